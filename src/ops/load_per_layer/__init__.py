"""``torch.ops.refcache.load_per_layer``: rows of one layer, host to device."""
