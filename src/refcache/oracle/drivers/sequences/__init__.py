"""Drives a cache through its sequences: what is where (``contents``), calls (``bench``), steps."""
