"""Engines, KV cache, token tree, sampling, the decode loop, and the text API. Importing this
package needs no torch."""
