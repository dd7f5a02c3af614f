"""A tree over an allocator: the steps (``driver``), the calls and checks (``bench``).

``serving`` is what a scheduler does with a request (``request``), ``forwards`` what computes it.
"""
