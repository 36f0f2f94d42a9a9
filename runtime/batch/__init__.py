"""Batches run many requests at once on one pair of engines. A scheduler runs them in a thread."""
