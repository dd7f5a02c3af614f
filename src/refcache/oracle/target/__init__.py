"""What is on trial: the protocol of targets (``base``) and how one is built (``config``).

Targets that come along: the reference (``reference``), a second implementation that decides
otherwise (``naive``, ``naive_allocator``), other people's ops (``ops``).
"""
