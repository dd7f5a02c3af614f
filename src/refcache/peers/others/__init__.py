"""Caches of other engines, unmodified, as targets: ``vllm:NAME``, ``nanovllm:NAME``, and so on."""
