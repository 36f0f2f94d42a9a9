"""OpenVINO GenAI's continuous batching. Models of floats compute in float32."""

import time
from typing import Any

PACKAGE = "openvino-genai"
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
FLOATS = ("F32", "F16", "BF16")


def load(path: str, options: dict[str, Any]) -> "Contestant":
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size, scheduler.enable_prefix_caching = options["rows"], 2, False
    properties = {"INFERENCE_NUM_THREADS": options["threads"], **(FLOAT32 if options["variant"] in FLOATS else {})}
    return Contestant(genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties))


class Contestant:
    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._last = 0

    def serve(self, prompts: list[list[int]], count: int, concurrency: int) -> list[dict[str, Any]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        found: list[dict[str, Any]] = [{"tokens": [], "times": []} for _ in prompts]
        waiting, running = list(range(len(prompts))), dict[int, tuple[Any, float]]()
        while waiting or running:
            while waiting and len(running) < concurrency:
                number = waiting.pop(0)
                self._last += 1
                ids = ov.Tensor(np.array([prompts[number]], np.int64))
                running[number] = self.pipeline.add_request(self._last, ids, config), time.perf_counter()
            self.pipeline.step()
            for number, (handle, started) in list(running.items()):
                while handle.can_read():
                    [output] = handle.read().values()
                    found[number]["tokens"] += list(output.generated_ids)
                    found[number]["times"] += [time.perf_counter() - started] * len(output.generated_ids)
                if len(found[number]["tokens"]) >= count:
                    del running[number]
        return found
