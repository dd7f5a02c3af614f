"""Host layouts as strides: one ``Layout`` value describes every order of a host buffer.

A host plane holds, for each token slot ``t``, layer ``l`` and head ``h``, a run of ``head_dim``
elements. Every layout places that run at::

    (t // P) * page_stride + (t % P) * slot_stride + l * layer_stride + h * head_stride

so one reference copy and one kernel serve them all. Names are SGLang's:

=====================  ==============================
``layer_first``        ``[L, size, H, D]``
``page_first``         ``[size, L, H, D]``
``page_first_direct``  ``[pages, L, P, H, D]``
``page_head``          ``[pages, H, P, L, D]``
=====================  ==============================

Strides are in elements of the buffer's dtype.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from refcache.errors import InvalidArgument, UnknownName

if TYPE_CHECKING:
    import torch

# layout name -> axes of the buffer, outermost first. "T" is the slot axis (pages * P of them).
LAYOUTS: dict[str, str] = {
    "layer_first": "LTHD",
    "page_first": "TLHD",
    "page_first_direct": "GLPHD",
    "page_head": "GHPLD",
}


@dataclass(frozen=True)
class Layout:
    """Where the rows of one host plane lie. Build one with :meth:`of`.

    Attributes:
        name: one of ``LAYOUTS``.
        shape: of the buffer.
        page_size: slots a page (``P`` above).
        layer_num, head_num, head_dim: extent of the plane; ``size`` is in slots, whole pages.
        page_stride, slot_stride, layer_stride, head_stride: in elements.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    page_size: int
    layer_num: int
    head_num: int
    head_dim: int
    page_stride: int
    slot_stride: int
    layer_stride: int
    head_stride: int

    @classmethod
    def of(
        cls, name: str, size: int, page_size: int, layer_num: int, head_num: int, head_dim: int
    ) -> "Layout":
        """The layout ``name`` for a plane of ``size`` slots.

        Raises:
            UnknownName: no such layout.
            InvalidArgument: an extent below 1, or ``size`` not in whole pages.
        """
        if name not in LAYOUTS:
            raise UnknownName("layout", name, LAYOUTS)
        extents = {"size": size, "page_size": page_size, "layer_num": layer_num}
        extents |= {"head_num": head_num, "head_dim": head_dim}
        for what, value in extents.items():
            if value < 1:
                raise InvalidArgument(f"{what}={value} of layout {name}: expected at least 1")
        if size % page_size:
            raise InvalidArgument(
                f"size={size} of layout {name}: expected a multiple of {page_size=}"
            )
        lengths = {"L": layer_num, "T": size, "G": size // page_size, "P": page_size}
        lengths |= {"H": head_num, "D": head_dim}
        axes = LAYOUTS[name]
        shape = tuple(lengths[a] for a in axes)
        strides: dict[str, int] = {}
        step = 1
        for axis, length in zip(reversed(axes), reversed(shape), strict=True):
            strides[axis] = step
            step *= length
        slot = strides.get("T", strides.get("P", 0))
        page = strides.get("G", slot * page_size)
        return cls(
            name, shape, size, page_size, layer_num, head_num, head_dim,
            page, slot, strides["L"], strides["H"],
        )  # fmt: skip

    @classmethod
    def of_buffer(cls, name: str, buffer: "torch.Tensor", page_size: int) -> "Layout":
        """The layout of an existing contiguous host buffer, read off its shape.

        Raises:
            UnknownName, InvalidArgument: as :meth:`of`; also when the rank does not fit, the page
                axis is not ``page_size``, or the buffer is not contiguous.
        """
        if name not in LAYOUTS:
            raise UnknownName("layout", name, LAYOUTS)
        axes = LAYOUTS[name]
        if buffer.dim() != len(axes):
            raise InvalidArgument(
                f"a {name} buffer of shape {tuple(buffer.shape)}: expected {len(axes)} axes, {axes}"
            )
        if not buffer.is_contiguous():
            raise InvalidArgument(
                f"a {name} buffer with strides {buffer.stride()}: expected contiguous memory"
            )
        extent = dict(zip(axes, buffer.shape, strict=True))
        if extent.get("P", page_size) != page_size:
            raise InvalidArgument(
                f"a {name} buffer with pages of {extent['P']}: expected {page_size}"
            )
        size = extent["T"] if "T" in extent else extent["G"] * page_size
        return cls.of(name, size, page_size, extent["L"], extent["H"], extent["D"])

    def offset(self, slot: int, layer: int, head: int = 0) -> int:
        """Element offset of (slot, layer, head): the formula of the module docstring."""
        return (
            (slot // self.page_size) * self.page_stride
            + (slot % self.page_size) * self.slot_stride
            + layer * self.layer_stride
            + head * self.head_stride
        )

    def rows(self, buffer: "torch.Tensor", layer: int) -> "torch.Tensor":
        """A view ``[pages, P, H, D]`` of a layer of ``buffer``; writing to it writes the buffer."""
        pages = self.size // self.page_size
        return buffer.as_strided(
            (pages, self.page_size, self.head_num, self.head_dim),
            (self.page_stride, self.slot_stride, self.head_stride, 1),
            buffer.storage_offset() + layer * self.layer_stride,
        )

    def page(self, buffer: "torch.Tensor", page: int) -> "torch.Tensor":
        """A view ``[L, P, H, D]`` of a page of ``buffer``; writing to it writes the buffer."""
        return buffer.as_strided(
            (self.layer_num, self.page_size, self.head_num, self.head_dim),
            (self.layer_stride, self.slot_stride, self.head_stride, 1),
            buffer.storage_offset() + page * self.page_stride,
        )
