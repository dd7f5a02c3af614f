"""Traces: record what a live cache does, judge it later, shrink what is wrong.

:func:`record` wraps an object of an engine; :func:`judge_trace` replays the file against the rules
and names the first record that no legal cache could have produced; :func:`shrink_trace` finds the
smallest part of it that still shows it. :func:`judge_events` does the same for a stream of KV
events.
"""
