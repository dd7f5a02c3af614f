"""KV events: as data (``kinds``), what is resident after them, streams judged and shrunk."""
