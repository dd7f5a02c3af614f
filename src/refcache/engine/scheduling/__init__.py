"""The loop (``scheduler``): requests come in, the next batch is chosen, launched and processed.

``schedule_policy`` decides who is admitted, ``queue_policy`` in which order they are asked;
``output_processor`` has the results; ``recovery`` computes again what a failed copy spoiled;
``observer`` is how others watch.
"""
