"""What a prefix needs beside the KV of its tokens: the components of a hybrid model's tree.

Every node of a prefix tree has one or more *components*. Each is a value that some layers need, a
count of those who hold it, and one rule: is a prefix usable at this node's end?

==========  ===================================  =====================================  ==========
component   value of a node                      usable at a node's end                 locked
==========  ===================================  =====================================  ==========
``full``    the KV slots of its tokens           always                                 to the root
``swa``     that their window slots live         the last window of tokens is live, or  one window
                                                 all of them from the root
``mamba``   one state, of the tokens up to its   a state is here                        the node
            end
==========  ===================================  =====================================  ==========

``full`` is the plain tree itself (:class:`~refcache.tree.RadixCache`): its value is ``value``, its
locks are ``lock_ref``, and there is no rule to ask. The others are a
:class:`~refcache.tree.components.component.TreeComponent` each, and
:class:`~refcache.tree.components.hybrid.HybridRadixCache` is a plain tree that asks its components
at the few places where they have a say: what of a path is usable, how a node is cut, what an
eviction takes with it, what a lock takes. There is one walk, one plan of an insert, one split and
one eviction of leaves for all trees. A node without a component's value is a *tombstone* of it: the
KV of its tokens is there, but a prefix that ends at it may not be usable.

The seam is a handful of methods that the plain tree names for its own purposes (``_usable``,
``_refresh``, ``_evict_upwards``, ``_hold``), so that who reads the plain tree needs nothing of
this.
"""

from refcache.tree.components.component import ComponentData, TreeComponent
from refcache.tree.components.hybrid import HybridRadixCache
from refcache.tree.components.node import HybridTreeNode
from refcache.tree.components.state import StateComponent
from refcache.tree.components.window import WindowComponent, WindowPlan

__all__ = [
    "ComponentData",
    "HybridRadixCache",
    "HybridTreeNode",
    "StateComponent",
    "TreeComponent",
    "WindowComponent",
    "WindowPlan",
]
