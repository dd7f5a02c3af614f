"""Drives a cache of three tiers: a tree over device and host, with a store below that may fail."""
