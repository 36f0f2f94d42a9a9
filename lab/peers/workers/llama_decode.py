"""A pass of llama.cpp or ik_llama.cpp. The C functions of both have the same names and the same
layout of a batch."""

from typing import Any


def decode(lib: Any, context: Any, tokens: list[int], start: int, every: bool) -> None:
    """Run a pass over tokens. The logits of every token or only of the last token are kept.

    Args:
        lib: The C functions.
        context: The runtime's context.
        tokens: Token ids of one sequence.
        start: Position of the first token.
        every: Whether to compute all logits.
    """
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index] = token
        batch.pos[index] = start + index
        batch.logits[index] = every or index == len(tokens) - 1
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
    failed = lib.llama_decode(context, batch)
    lib.llama_batch_free(batch)
    if failed:
        raise RuntimeError("llama_decode failed")
