"""Who owns each page (``ledger``), and the allocator that tells it (``recording``)."""
