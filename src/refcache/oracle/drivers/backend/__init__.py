"""Drives storage backends: their calls, damage of their files, crashes."""
