"""The command line: ``refcache check``, ``replay``, ``judge``, ``campaign`` and the others."""

import warnings

# torch says so on import where NumPy is not installed; nothing here needs it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
