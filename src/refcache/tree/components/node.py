"""``HybridTreeNode``: a node with the data of each component, under SGLang's names as well."""

from dataclasses import dataclass
from typing import Any

import torch

from refcache.tree.node import TreeNode


@dataclass
class ComponentData:
    """What a node has of one component.

    Attributes:
        value: int64 slots, or None: the node is a tombstone of the component.
        lock_ref: its holders; above 0 the value stays.
        uuid: names the node where the locks of some holders end (windows only).
    """

    value: torch.Tensor | None = None
    lock_ref: int = 0
    uuid: int | None = None


class HybridTreeNode(TreeNode):
    """A node of a hybrid tree.

    Attributes:
        components: by name, what it has of each component but ``full``, which is the node itself.
    """

    __slots__ = ("components",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.components: dict[str, ComponentData] = {}

    def component(self, name: str) -> ComponentData:
        """What the node has of a component; of ``full``, a copy made for the purpose."""
        if name == "full":
            return ComponentData(self.value, self.lock_ref)
        return self.components.setdefault(name, ComponentData())

    @property
    def full_lock_ref(self) -> int:
        """Holders in the subtree of this node: its KV stays."""
        return self.lock_ref

    @property
    def mamba_value(self) -> torch.Tensor | None:
        """The state slot, int64 ``[1]``; None: a tombstone."""
        return self.component("mamba").value

    @property
    def mamba_lock_ref(self) -> int:
        """Holders that end here: the state stays."""
        return self.component("mamba").lock_ref

    @property
    def swa_tombstone(self) -> bool:
        """The window slots of its tokens are gone."""
        return self.component("swa").value is None

    @property
    def swa_lock_ref(self) -> int:
        """Holders whose window reaches into this node: its window slots stay."""
        return self.component("swa").lock_ref

    @property
    def swa_uuid(self) -> int | None:
        """What ``inc_lock_ref`` returned to those whose window ends here."""
        return self.component("swa").uuid
