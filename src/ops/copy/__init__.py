"""What ``backup_all_layer``, ``load_per_layer`` and ``load_layers`` share: one strided row copy."""
