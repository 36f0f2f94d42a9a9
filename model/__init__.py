"""The torch definition: configuration, decoder, exit head, and reading of Hugging Face checkpoints."""
