"""Every rule: its sentence (``catalog``), and the checks of a state (``tree``, ``pages``,
``host``).

``check`` runs the checks of a state, ``events`` replays KV events, ``violation`` is what a broken
rule raises. Rules about one call are checked where the call is made, in the drivers.
"""
