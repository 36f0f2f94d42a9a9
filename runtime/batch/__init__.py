"""Batches: many requests at once on one pair of engines, run by a scheduler in a thread."""
