"""``torch.ops.refcache.alloc_decode``: one slot a request for its next token."""
