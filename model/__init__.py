"""The torch modules (decoder, exit head, draft and verify), and the reader of Hugging Face
checkpoints."""
