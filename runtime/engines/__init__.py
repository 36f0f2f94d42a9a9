"""Engines: one protocol, one KV cache, and a file or two for each backend."""
