"""``python -m eesd.bench.tools.peers``: EESD side by side with other runtimes on one GGUF file, in processes."""
