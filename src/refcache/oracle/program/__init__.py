"""Programs: guarded calls (``trial``), the log of steps (``driver``), the smallest one
(``shrink``).

``exact`` holds choices against those of a reference; ``torch_settings`` are what no call may
change.
"""
