"""This package has the engines, the KV cache, the token tree, sampling, the decode loop, and the
text API. Importing it does not need torch."""
