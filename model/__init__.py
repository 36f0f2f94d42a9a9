"""The model in torch (the decoder, the exit head, and the draft and verify modules), and the code
that reads Hugging Face checkpoints."""
