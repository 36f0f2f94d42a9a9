"""Decoding: a round (draft, verify, accept, commit) and its parts."""
