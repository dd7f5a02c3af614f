"""Bugs planted in the trees of hybrid models: recurrent states, sliding windows."""
