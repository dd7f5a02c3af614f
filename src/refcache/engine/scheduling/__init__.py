"""The loop (``scheduler``): which batch is next (``batching``), what becomes of its tokens.

``schedule_policy`` decides who is admitted, ``queue_policy`` in which order they are asked;
``output_processor`` has the results; ``recovery`` computes again what a failed copy spoiled;
``observer`` is how others watch.
"""
