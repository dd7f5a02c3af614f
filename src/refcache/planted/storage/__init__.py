"""Bugs planted in what keeps pages below the host."""
