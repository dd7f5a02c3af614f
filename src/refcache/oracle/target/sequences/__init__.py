"""Caches as sequences see them: the contract, bases for adapters, and three implementations.

``contract`` says what each call must do; ``blocks`` is the base of an adapter for a cache of hashed
blocks. ``naive`` is a dictionary; ``radix`` and ``hiradix`` put the reference's trees on trial.
"""
