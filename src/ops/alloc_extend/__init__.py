"""``torch.ops.refcache.alloc_extend``: the slots of the tokens a batch grows by."""
