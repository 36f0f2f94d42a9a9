"""llama.cpp's server with parallel slots, as the package xllamacpp carries it. It takes a directory
with ``model.gguf``."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PACKAGE = "xllamacpp"


def load(path: str, options: dict[str, Any]) -> "Contestant":
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(Path(path) / "model.gguf")
    parameters.n_parallel = options["rows"]
    parameters.n_ctx = options["slots"] * options["rows"]
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options["threads"]
    return Contestant(xllamacpp.Server(parameters))


class Contestant:
    def __init__(self, server: Any) -> None:
        self.server = server

    def serve(
        self, prompts: list[list[int]], counts: list[int], concurrency: int
    ) -> list[dict[str, Any]]:
        def ask(prompt: list[int], count: int) -> dict[str, Any]:
            times: list[float] = []
            started = time.perf_counter()
            wanted = {
                "n_predict": count,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "cache_prompt": False,
            }

            def on_chunk(_: str) -> bool:
                times.append(time.perf_counter() - started)
                return False

            self.server.handle_completions(json.dumps({"prompt": prompt, **wanted}), on_chunk)
            # A chunk may hold several tokens, where a character has several: the times between the
            # first and the last are even.
            first = times[0]
            last = times[-1]
            return {
                "tokens": None,
                "times": [first + (last - first) * i / max(count - 1, 1) for i in range(count)],
            }

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(ask, prompts, counts))
