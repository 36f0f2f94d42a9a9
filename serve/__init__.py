"""The server: OpenAI's API for many requests at once."""
