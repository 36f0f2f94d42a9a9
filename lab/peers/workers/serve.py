"""Serve one contestant over a pipe. ``python serve.py FILE`` reads one JSON request per line and
answers each with one line.

An answer is an object. It has ``error`` if the request failed. Output of libraries to stdout goes
to stderr.
"""

import importlib.util
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any


class Server:
    """Answers requests with the peer of one file."""

    def __init__(self, peer: ModuleType) -> None:
        self.peer = peer
        self.contestant: Any = None

    def hello(self) -> dict[str, Any]:
        """Return the name and the version of the peer's package."""
        package = self.peer.PACKAGE
        return {"package": package, "version": getattr(self.peer, "version", version)(package)}

    def convert(self, model: str, output: str, variant: str) -> dict[str, Any]:
        self.peer.convert(model, output, variant)
        return {}

    def load(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        """Load the contestant. The seconds include the import of the peer's libraries."""
        started = time.perf_counter()
        self.contestant = self.peer.load(path, options)
        return {"seconds": time.perf_counter() - started}

    def generate(self, prompt: list[int], count: int, temperature: float) -> dict[str, Any]:
        tokens, seconds = self.contestant.generate(prompt, count, temperature)
        if len(tokens) != count or len(seconds) != count:
            raise RuntimeError(
                f"gave {len(tokens)} tokens with {len(seconds)} times instead of {count}"
            )
        return {"tokens": [int(token) for token in tokens], "seconds": seconds}

    def prefill(self, tokens: list[int], start: int) -> dict[str, Any]:
        """Fill the cache from position ``start`` on."""
        return {"seconds": self.contestant.prefill(tokens, start)}

    def slot_bytes(self) -> dict[str, Any]:
        return {"bytes": self.contestant.slot_bytes()}

    def passes(self, rows: int, behind: int, count: int) -> dict[str, Any]:
        """Measure ``count`` passes over ``rows`` tokens with a filled cache. An additional pass
        before these passes warms up."""
        return {"seconds": self.contestant.passes(rows, behind, count + 1)[1:]}

    def serve(
        self, prompts: list[list[int]], counts: list[int], concurrency: int
    ) -> dict[str, Any]:
        """Generate after all prompts. ``concurrency`` requests run at a time. Returns the tokens of
        each prompt and their seconds."""
        started = time.perf_counter()
        found = self.contestant.serve(prompts, counts, concurrency)
        return {"seconds": time.perf_counter() - started, "requests": found}

    def logits(self, tokens: list[int], output: str) -> dict[str, Any]:
        """Write the logits after each token (float32, [n, V]) to the file ``output``. The answer
        says whether the peer gives logits."""
        found = self.contestant.logits(tokens)
        if found is not None:
            import numpy as np

            np.save(output, np.ascontiguousarray(found, dtype=np.float32))
        return {"given": found is not None}


def read_peer(path: str) -> ModuleType:
    """Return the module in this file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server = Server(read_peer(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("op"))(**request)
        except Exception as error:  # a library may raise anything; the runner shows it in one line
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
