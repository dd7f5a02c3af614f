"""Two tiers: the steps (``driver``), the calls and checks (``bench``), the bytes (``content``).

``forwards`` launches what computes them.
"""
