"""Measurements on an engine. This package reads the prompts, runs them, times single calls, and
stores everything in a JSON file."""
