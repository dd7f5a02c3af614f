"""A compiled function that allocates slots, writes KV into them and backs them up to the host."""

import torch

import refcache_ops

on = "cuda" if torch.cuda.is_available() else "cpu"
kv = torch.zeros(2, 64, 8, 16, device=on)  # [layer, slot, head, dim]
host = torch.zeros(2, 256, 8, 16, pin_memory=on == "cuda")


@torch.compile(fullgraph=True, dynamic=True)
def prefill(rows, seq_lens, free_pages, host_slots):
    """Slots for a batch of prompts; their rows in both tiers."""
    none = torch.zeros_like(seq_lens)
    slots = refcache_ops.alloc_extend(none, seq_lens, none - 1, free_pages, 4, rows.shape[1])
    kv[:, slots] = rows
    refcache_ops.backup_all_layer([host], [kv], host_slots, slots, 4, "layer_first")
    return slots


rows, to = torch.rand(2, 11, 8, 16, device=on), torch.arange(100, 111, device=on)
slots = prefill(rows, torch.tensor([4, 7], device=on), torch.arange(1, 16, device=on), to)
if on == "cuda":
    torch.cuda.synchronize()  # host bytes arrive later
assert torch.equal(host[:, 100:111], rows.cpu())
print("backed up slots", slots.tolist())
