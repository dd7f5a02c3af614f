"""``torch.ops.refcache.backup_all_layer``: rows of every layer, device to host."""
