"""The engines. This package has their protocol, the KV caches, and a file or two for each
backend."""
