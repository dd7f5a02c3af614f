"""``torch.ops.refcache.load_layers``: several layers in one launch, each announced by a flag."""
