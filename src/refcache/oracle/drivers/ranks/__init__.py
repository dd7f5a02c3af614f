"""Ranks of a group: the same steps on each (``driver``), and where they meet (``group``)."""
