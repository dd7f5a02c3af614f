"""The models that the loop runs: names of origins instead of numbers, or a small transformer."""
