"""The server. It offers OpenAI's API, and answers many requests at once."""
