"""The command line: ``refcache check``, ``replay``, ``workload``, ``planted``."""
