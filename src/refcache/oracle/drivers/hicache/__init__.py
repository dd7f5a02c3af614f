"""Two tiers: the steps (``driver``), the calls and checks (``bench``), the bytes (``content``)."""
