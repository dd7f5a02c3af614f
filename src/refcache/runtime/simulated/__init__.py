"""The simulated machine (``machine``): launches in any order that CUDA would allow.

``streams`` has its streams and events, ``tracker`` finds accesses that nothing orders, ``choices``
say what runs next, ``without`` takes one ordering edge away.
"""
