"""Measurements on an engine: prompts, runs, call latencies, and the JSON file that stores them."""
