"""Pictures of a failure: one HTML file, and a timeline for Perfetto.

``frames`` looks at a driver after each step of its program; ``timeline`` turns what a simulated
machine did into data; ``page`` puts both into one file that needs no network (``page.html``,
``page.css`` and ``page.js`` are what it is made of).
"""

from refcache.picture.frames import frame_of
from refcache.picture.page import Picture, write_page
from refcache.picture.timeline import trace_events, write_trace_events

__all__ = ["Picture", "frame_of", "trace_events", "write_page", "write_trace_events"]
