"""EESD's batch in a process: drafting as the load says, always, or never."""

import threading
import time
from typing import Any

PACKAGE = "eesd"


def load(path: str, options: dict[str, Any]) -> "Contestant":
    from eesd.runtime.batch.scheduler import BatchOptions
    from eesd.runtime.batch.service import Service
    from eesd.runtime.llm import load

    levels = {"automatic": None, "always": options["levels"], "never": 0}[options["mode"]]
    batch = BatchOptions(max_rows=options["rows"], prefix_memory=0, levels=levels)
    return Contestant(Service(load(path, "ort", threads=options["threads"]), batch), options["mode"] != "never")


class Contestant:
    def __init__(self, service: Any, draft: bool) -> None:
        self.service = service
        self.draft = draft

    def serve(self, prompts: list[list[int]], count: int, concurrency: int) -> list[dict[str, Any]]:
        from eesd.runtime.request import Request

        waiting, lock, done = list(enumerate(prompts)), threading.Lock(), threading.Semaphore(0)
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

            request = Request(tokens=prompt, max_new_tokens=count, ignore_eos=True, draft=self.draft)
            self.service.submit(request, on_update)

        for _ in range(concurrency):
            begin()
        for _ in prompts:
            done.acquire()
        return found
