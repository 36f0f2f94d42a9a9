"""Benchmarks: traces of real runs, controllers replayed on them, and measurements on the wall clock."""
