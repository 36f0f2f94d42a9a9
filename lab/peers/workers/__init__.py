"""Files that run in the peers' interpreter, which need not have EESD. Only EESD's worker imports
EESD.

``serve.py`` is the program. Each other file is one peer, with the same things:

* ``convert(model, output, variant)`` writes the GGUF file ``model`` (llama.cpp: also a checkpoint)
  to the directory ``output`` in the peer's format. It is missing where the peer reads checkpoints.
* ``load(path, options)`` returns an object with ``generate(prompt, count)`` and ``logits(tokens)``.
  Options are ``variant`` and ``mode`` as in ``contestants.py``, ``threads``, and ``slots`` (most
  tokens of prompt and text).
* ``generate`` returns exactly ``count`` greedy tokens, past any EOS, and the seconds from the call
  to each of them.
* ``logits`` returns float32 [n, V], or None where the peer gives none.
* ``prefill(tokens, start)`` and ``passes(rows, behind, count)`` time single calls, and
  ``slot_bytes()`` says what a token takes in the cache. Not every peer has them.
* ``PACKAGE`` is the name by which pip knows the peer; ``version(PACKAGE)`` gives its version if pip
  does not.
"""
