"""Published releases of real engines as targets, unmodified, on a machine without a GPU.

``peer_target("sglang:0.5.10")``. The release must be unpacked (``make peers``); one process judges
one release.
"""

from typing import TYPE_CHECKING

from refcache.lazy import lazy_names

if TYPE_CHECKING:
    from refcache.peers.engine import Engine, load
    from refcache.peers.named import peer_target
    from refcache.peers.releases import VERSIONS, unpacked

__all__ = ["VERSIONS", "Engine", "load", "peer_target", "unpacked"]

__getattr__ = lazy_names(__name__)
