"""Decoding runs in rounds (draft, verify, accept, commit). This package has a round and its
parts."""
