"""The torch modules (decoder, exit head, draft and verify modules), and the reader of Hugging Face
checkpoints."""
