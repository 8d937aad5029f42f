"""Benchmarks: the time and memory of a cache, with all peers in turn within one run.

Importing this package runs nothing. ``timing`` holds what the benchmarks share.
"""
