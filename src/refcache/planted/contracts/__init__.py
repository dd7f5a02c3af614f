"""Bugs of the contracts that any cache can meet: ``offload``, ``sequences``."""
