"""refcache_ops: the hot paths of a hierarchical KV cache as ``torch.ops.refcache.*``.

================  ==============================================================
``alloc_extend``      slots of the tokens a batch grows by
``alloc_decode``      one slot a request
``backup_all_layer``  rows of every layer, device to (pinned) host
``load_per_layer``    rows of one layer, host to device
``load_layers``       rows of several layers in one launch, each announced by a flag
================  ==============================================================

Importing this package registers the ops. On the CPU they are :mod:`refcache.reference`; on CUDA
they are Triton kernels that give the same bytes (``refcache[triton]``). The copies here are the
overloads ``torch.ops.refcache.<op>.default``, which cost the host less than a choice of overload at
every call; the allocations have a second one, with a cursor. They work under
``torch.compile(fullgraph=True)``, in CUDA graphs and without a hidden synchronisation. The ops have
no autograd formula: a buffer that requires grad is refused.
"""

import torch

import refcache_ops.alloc_decode.op
import refcache_ops.alloc_extend.op
import refcache_ops.backup_all_layer.op
import refcache_ops.load_layers.op
import refcache_ops.load_per_layer.op  # noqa: F401

OPS = ("alloc_extend", "alloc_decode", "backup_all_layer", "load_per_layer", "load_layers")

alloc_extend = torch.ops.refcache.alloc_extend
alloc_decode = torch.ops.refcache.alloc_decode
backup_all_layer = torch.ops.refcache.backup_all_layer.default
load_per_layer = torch.ops.refcache.load_per_layer.default
load_layers = torch.ops.refcache.load_layers.default

__all__ = [*OPS, "OPS"]
