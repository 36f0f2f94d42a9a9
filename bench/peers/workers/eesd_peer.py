"""EESD itself, decoding plainly or drafting with the default controller. Runs in the interpreter of the benchmark."""

import time
from typing import Any

import numpy as np

PACKAGE = "eesd"


def load(path: str, options: dict[str, Any]) -> "Contestant":
    import eesd
    from eesd.runtime.llm import Speculation

    # Prompts are repeated, and what an earlier run of one said must not be copied.
    speculation = Speculation() if options["mode"] == "drafting" else None
    return Contestant(eesd.load(path, threads=options["threads"], generation_config="none", speculation=speculation))


class Contestant:
    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        seconds: list[float] = []
        started = time.perf_counter()
        with self.llm.session(prompt, max_new_tokens=count, ignore_eos=True) as session:
            while session.finish_reason is None:
                new = len(session.step().tokens)
                seconds += [time.perf_counter() - started] * new
            return session.tokens[len(prompt) :], seconds

    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """By the verify engine, in the chunks of a prefill."""
        from eesd.runtime.engines.base import Call

        verify = self.llm.engines.verify
        [cache] = verify.new_kv_caches()
        rows = []
        for start in range(0, len(tokens), verify.prefill_chunk):
            chunk = tokens[start : start + verify.prefill_chunk]
            cache.reserve(start + len(chunk))
            [outputs] = verify.forward([Call(cache, chunk, range(start, start + len(chunk)), start)])
            rows.append(outputs.logits.copy())
        return np.concatenate(rows)
