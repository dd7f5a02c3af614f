"""What a cache shows of itself, in plain data: nodes (``tree``), the host tier (``host``).

``state`` adds who else owns pages, which is what rules are about; ``scheduler`` makes one of the
serving loop.
"""
