"""EESD itself. It decodes plainly, drafts with the default controller, or runs batches. This worker
runs in the interpreter of the benchmark."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "eesd"


def load(path: str, options: dict[str, Any]) -> "Contestant | Batch":
    """Load the engines. If the option ``rows`` is given, a batch of ``rows`` requests is returned.
    The mode then says when it drafts (``automatic``, ``always`` or ``never``)."""
    import eesd
    from eesd.runtime.llm import Speculation

    mode = options["mode"]
    threads = options["threads"]
    if "rows" in options:
        from eesd.runtime.batch.scheduler import BatchOptions
        from eesd.runtime.batch.service import Service

        levels = {"automatic": None, "always": options["levels"], "never": 0}[mode]
        batch = BatchOptions(max_rows=options["rows"], prefix_memory=0, levels=levels)
        return Batch(Service(eesd.load(path, "ort", threads=threads), batch), mode != "never")
    if mode not in ("plain", "drafting"):  # CPU kernels and caches
        sys.path.append(
            str(Path(__file__).parents[3])
        )  # the program is not started in the checkout
        from lab.exactness import open_with

        return Contestant(open_with(Path(path), "ort", mode, threads, "int8"))
    # Prompts are repeated, and text from an earlier run of a prompt must not be copied.
    # A single text of a large model gains from second candidates (docs/controllers.md).
    speculation = Speculation(tree=1) if mode == "drafting" else None
    return Contestant(
        eesd.load(path, threads=threads, generation_config="none", speculation=speculation)
    )


class Contestant:
    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(
        self, prompt: list[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        from eesd.runtime.decoding.sampling import Sampling

        seconds: list[float] = []
        sampling = Sampling(temperature=temperature, seed=1)
        started = time.perf_counter()
        with self.llm.session(prompt, sampling, max_new_tokens=count, ignore_eos=True) as session:
            while session.finish_reason is None:
                new = len(session.step().tokens)
                seconds += [time.perf_counter() - started] * new
            return session.tokens[len(prompt) :], seconds

    def prefill(self, tokens: list[int], start: int) -> float:
        """Fill the cache from position ``start`` on, and compute the logits of the last token.
        Returns the seconds."""
        from eesd.runtime.engines.base import Call

        verify = self.llm.engines.verify
        stop = start + len(tokens)
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
        """Return the seconds of ``count`` passes over ``rows`` tokens. A pass gives the logits of
        each token."""
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
        """Return the bytes of a token's keys and values that a pass of the verify engine reads."""
        manifest = self.llm.manifest
        read: int = sum(len(graph.caches) for graph in manifest.verify)
        return int(self.cache.slot_bytes) * read // int(manifest.num_caches)

    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Return the logits of the verify engine. They are computed in the chunks of a prefill."""
        from eesd.runtime.engines.base import Call

        verify = self.llm.engines.verify
        [cache] = verify.new_kv_caches()
        rows = []
        for start in range(0, len(tokens), verify.prefill_chunk):
            chunk = tokens[start : start + verify.prefill_chunk]
            cache.reserve(start + len(chunk))
            [outputs] = verify.forward(
                [Call(cache, chunk, range(start, start + len(chunk)), start)]
            )
            rows.append(outputs.logits.copy())
        return np.concatenate(rows)


class Batch:
    def __init__(self, service: Any, draft: bool) -> None:
        self.service = service
        self.draft = draft

    def serve(
        self, prompts: list[list[int]], counts: list[int], concurrency: int
    ) -> list[dict[str, Any]]:
        from eesd.runtime.request import Request

        waiting = list(enumerate(prompts))
        lock = threading.Lock()
        done = threading.Semaphore(0)
        found: list[dict[str, Any]] = [{"tokens": [], "times": []} for _ in prompts]

        def begin() -> None:
            with lock:
                if not waiting:
                    return
                number, prompt = waiting.pop(0)
            started = time.perf_counter()

            def on_update(update: Any) -> None:
                now = time.perf_counter() - started
                found[number]["tokens"] += [output.token for output in update.tokens]
                found[number]["times"] += [now] * len(update.tokens)
                if update.finish_reason is not None:
                    begin()
                    done.release()

            request = Request(
                tokens=prompt, max_new_tokens=counts[number], ignore_eos=True, draft=self.draft
            )
            self.service.submit(request, on_update)

        for _ in range(concurrency):
            begin()
        for _ in prompts:
            done.acquire()
        return found
