"""Decode greedily with a draft of fixed length. The program needs only numpy and onnxruntime, and
runs an engine directory.

    python examples/one_round.py plans/ 5 9 3        # ids of the prompt; prints the ids of the text

It runs float32 directories that have no stages, no deep layers and no EAGLE-3 heads
(docs/engine-directory.md). Its rounds are like those of EESD, but without trees, sampling, and the
code that makes them fast.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

LENGTH = 3
"""The number of draft steps in a round."""


def generate(directory: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """Returns the greedy tokens after ``prompt``, up to EOS."""
    manifest = json.loads((directory / "manifest.json").read_text("utf-8"))
    [verify_info] = manifest["verify"]
    draft_info = manifest["draft"]
    verify, draft = (
        ort.InferenceSession(directory / info["file"]) for info in (verify_info, draft_info)
    )
    geometry = manifest["geometry"]
    slots = manifest["max_seq_len"]
    shape = 1, geometry["num_kv_heads"], slots, geometry["head_dim"]
    caches = {
        f"{kind}_{i}": np.zeros(shape, np.float32)
        for i in verify_info["caches"]
        for kind in ("key", "value")
    }

    def call(session: ort.InferenceSession, tokens: list[int], slot: int) -> list[np.ndarray]:
        """Run a chain of tokens. The first token has the slot ``slot``. The keys and values are
        written in place, and the other results are returned."""
        positions = np.arange(slot, slot + len(tokens))
        hidden = np.arange(slots) > positions[:, None]
        given = {
            "input_ids": [tokens],
            "position_ids": [positions],
            "write_indices": [slot],
            "logit_rows": range(len(tokens)),
        }
        given = {name: np.array(values, np.int64) for name, values in given.items()}
        given |= {"attn_mask": np.where(hidden, -30000, 0).astype(np.float32)[None, None]} | caches
        results = session.run(None, {one.name: given[one.name] for one in session.get_inputs()})
        named = dict(zip([one.name for one in session.get_outputs()], results, strict=True))
        caches.update(
            {
                name.removesuffix("_out"): value
                for name, value in named.items()
                if name.endswith("_out")
            }
        )
        return [value for name, value in named.items() if not name.endswith("_out")]

    tokens = list(prompt)
    end = len(prompt) + new_tokens
    if len(prompt) > 1:
        call(verify, tokens[:-1], 0)  # all but the last token, which is the first root
    while len(tokens) < end:
        root = len(tokens) - 1
        drafted = list[int]()
        # Draft: the bonus token must fit after it.
        for step in range(min(LENGTH, end - len(tokens) - 1)):
            _, ids, _ = call(draft, [[tokens[-1], *drafted][step]], root + step)
            drafted.append(int(ids[0, 0, 0]))
        # Verify: one pass over the root and the draft.
        [logits] = call(verify, [tokens[-1], *drafted], root)
        chosen = logits[0].argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != chosen[i]), len(drafted))
        # Commit the accepted tokens, and the bonus token, which is the next root.
        for token in chosen[: accepted + 1]:
            tokens.append(token)
            if token in manifest["eos_token_ids"]:
                return tokens[len(prompt) :]
    return tokens[len(prompt) :]


if __name__ == "__main__":
    print(*generate(Path(sys.argv[1]), [int(token) for token in sys.argv[2:]], 40))
