"""A comparison of the tokenizers of GGUF files with llama.cpp."""
