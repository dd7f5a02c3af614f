"""A product of its own: request traces through the serving loop, every step checked.

``loop`` is the replay, of a scheduler that ``parts`` makes as ``config`` says, with the checks of
``state``; ``tree`` replays a trace on the tree alone, ``workload`` draws one from a seed.
"""
