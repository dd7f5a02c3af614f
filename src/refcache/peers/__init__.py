"""Published releases of real engines as targets, unmodified, on a machine without a GPU.

``peer_target("sglang:0.5.10")``. The release must be unpacked (``make peers``); one process judges
one release.
"""

from refcache.peers.engine import VERSIONS, Engine, load, unpacked
from refcache.peers.named import peer_target

__all__ = ["VERSIONS", "Engine", "load", "peer_target", "unpacked"]
