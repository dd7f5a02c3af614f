"""A tree over a full and a sliding-window pool: steps (``driver``), calls and checks (``bench``).

``serving`` is what a scheduler does with a request, ``forwards`` what computes it. What a plain
tree's driver does is reused: :mod:`refcache.oracle.drivers.tree`.
"""
