"""Planted kernel bugs need Triton's interpreter, chosen before Triton is first imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
