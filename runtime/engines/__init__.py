"""Engines: a protocol, the KV caches, and a file or two for each backend."""
