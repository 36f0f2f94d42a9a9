"""EESD itself, decoding plainly or drafting with the default controller. Runs in the interpreter of the benchmark."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

PACKAGE = "eesd"
CACHE_DTYPE = "float32"
"""Of the CPU engine's cache."""


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

    def prefill(self, tokens: list[int], start: int) -> float:
        """Fill the cache from a position on, with the logits of the last token. Gives the seconds."""
        from eesd.runtime.engines.base import Call

        verify, stop = self.llm.engines.verify, start + len(tokens)
        if start == 0:
            [self.cache] = verify.new_kv_caches()
        started = time.perf_counter()
        self.cache.reserve(stop)
        for at in range(start, stop - 1, verify.prefill_chunk):
            chunk = tokens[at - start : min(at + verify.prefill_chunk, stop - 1) - start]
            verify.forward([Call(self.cache, chunk, range(at, at + len(chunk)), at, logits=False)])
        verify.forward([Call(self.cache, tokens[-1:], [stop - 1], stop - 1)])
        return time.perf_counter() - started

    def passes(self, rows: int, behind: int, count: int) -> list[float]:
        """Seconds of ``count`` passes over ``rows`` tokens, which give the logits of each token."""
        from eesd.runtime.engines.base import Call

        self.cache.reserve(behind + rows)
        call = Call(self.cache, [7] * rows, range(behind, behind + rows), behind)
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            self.llm.engines.verify.forward([call])
            seconds.append(time.perf_counter() - started)
        return seconds

    def slot_bytes(self) -> int:
        """Bytes of keys and values of a token that a pass of the verify engine reads."""
        from eesd.export.memory import slot_bytes

        manifest = self.llm.manifest
        return slot_bytes(replace(manifest, dtype=CACHE_DTYPE), sum(len(graph.caches) for graph in manifest.verify))

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
