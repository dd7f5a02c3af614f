"""A tree of tokens and recurrent states: the steps (``driver``), calls and checks (``bench``).

``serving`` is what a scheduler does with a request (``request``). What a plain tree's driver does
is reused: :mod:`refcache.oracle.drivers.tree`.
"""
