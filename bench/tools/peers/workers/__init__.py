"""Files that run in the peers' own interpreter, which need not have EESD: but for EESD's own, none of them imports EESD.

``serve.py`` is the program. Each other file is one peer, with the same things:

* ``convert(model, output, variant)`` writes the GGUF file ``model`` to the directory ``output`` in the peer's form.
* ``load(path, options)`` returns an object. Options are ``variant`` and ``mode`` as in ``contestants.py``, ``threads``, and
  ``slots`` (most tokens of prompt and text).
* ``generate(prompt, count)`` returns exactly ``count`` greedy tokens, past any EOS, and the seconds from the call to each.
* ``prefill(tokens, start)`` and ``passes(rows, behind, count)`` time single calls, and ``slot_bytes()`` says what a token takes
  in the cache. ``serve(prompts, count, concurrency)`` decodes many at once. Not every peer has them.
* ``PACKAGE`` is the name by which pip knows the peer.
"""
