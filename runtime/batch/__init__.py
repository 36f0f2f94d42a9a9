"""Many requests at once over one pair of engines: rows of a batch, a scheduler, a thread."""
