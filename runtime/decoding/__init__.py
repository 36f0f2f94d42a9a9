"""Decoding runs in rounds (draft, verify, accept, commit). This package has the code of a round."""
