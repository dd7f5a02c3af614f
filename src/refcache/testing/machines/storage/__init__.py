"""Machines of the part ``storage``: backends, and a cache of three tiers."""
