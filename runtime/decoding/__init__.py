"""Decoding: one round of draft, verify, accept, commit, and what it is made of."""
