"""Engines, KV cache, token tree, sampling, the decode loop, and the text API. Importing it needs no
torch."""
