"""Engines, KV cache, token tree, sampling, the decode loop, and the text API. Needs no torch."""
