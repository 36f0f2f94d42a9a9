"""A comparison of GGUF tokenizers with llama.cpp."""
