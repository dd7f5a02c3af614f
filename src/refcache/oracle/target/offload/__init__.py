"""Offloading managers on trial: the contract ``offload``, the reference and the naive one."""
