"""A pass of llama.cpp or ik_llama.cpp, whose C functions share names and the layout of a batch."""

from typing import Any


def decode(lib: Any, context: Any, tokens: list[int], start: int, every: bool) -> None:
    """Run a pass over tokens; keep the logits of every token or only of the last token.

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
