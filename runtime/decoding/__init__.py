"""Decoding: a round of draft, verify, accept and commit, and its parts."""
