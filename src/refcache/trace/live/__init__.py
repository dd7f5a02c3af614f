"""Watches a live cache from inside its process, at a cost that a server can bear."""
