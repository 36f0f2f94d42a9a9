"""The server: OpenAI's API over many requests at once."""
