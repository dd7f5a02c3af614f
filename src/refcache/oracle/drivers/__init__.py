"""One driver a subject: an allocator, a tree, two tiers, ranks, a serving loop, ops, streams.

A driver is the steps of a program; the bench that it drives has the components on trial, the
ledger, the single calls and the checks. ``misuse`` adds calls that must be refused.
"""
