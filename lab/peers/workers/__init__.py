"""Files that run in the peers' interpreter, which need not have EESD. Only EESD's worker imports
EESD.

``serve.py`` is the program. Each other file is one peer. All peers have the same interface:

* ``convert(model, output, variant)`` writes the GGUF file ``model`` (llama.cpp: also a checkpoint)
  to the directory ``output`` in the peer's format. A peer that reads checkpoints lacks it.
* ``load(path, options)`` returns an object with ``generate(prompt, count)`` and ``logits(tokens)``.
  Options are ``variant`` and ``mode`` as in ``contestants.py``, ``threads``, and ``slots`` (the
  maximum number of tokens of prompt and text).
* ``generate`` returns exactly ``count`` greedy tokens (it continues past any EOS), and the seconds
  from the call to each of them.
* ``logits`` returns float32 [n, V], or None if the peer gives none.
* ``prefill(tokens, start)`` and ``passes(rows, behind, count)`` time single calls, and
  ``slot_bytes()`` returns the bytes of a token in the cache. Not every peer has them.
* ``PACKAGE`` is the peer's name in pip. If pip does not know its version, ``version(PACKAGE)``
  returns it.
"""
