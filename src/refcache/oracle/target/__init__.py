"""What is on trial: the protocol (``base``), how it is built (``config``), names (``resolve``).

Targets that come along: the reference (``reference``), a second implementation that decides
otherwise (``naive``, ``naive_allocator``), other people's ops (``ops``).
"""
