"""OpenVINO GenAI, which reads GGUF files itself. It decodes plainly, with prompt lookup, or in
batches.

No hints are set, so OpenVINO chooses the precision of activations and KV cache.
"""

import time
from pathlib import Path
from typing import Any

PACKAGE = "openvino-genai"
LOOKUP_TOKENS = 5
LOOKUP_NGRAM = 3
"""The value of the example in OpenVINO's documentation."""


def convert(model: str, output: str, _: str) -> None:
    """Let OpenVINO GenAI read a GGUF file, and save the resulting model next to the file, so
    that later loads are quick."""
    import openvino_genai as genai

    link = Path(output) / "model.gguf"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(model)
    genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()
    if not (Path(output) / "openvino_model.xml").exists():
        raise RuntimeError("OpenVINO GenAI wrote no openvino_model.xml")


def load(path: str, options: dict[str, Any]) -> "Contestant | Batch":
    """Load the model. If the option ``rows`` is given, a batch of at most ``rows`` requests is
    returned."""
    import openvino_genai as genai

    properties = {"INFERENCE_NUM_THREADS": options["threads"]}
    if "rows" in options:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = options["rows"]
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = False
        return Batch(genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties))
    lookup = {"prompt_lookup": True} if options["mode"] == "lookup" else {}
    return Contestant(
        path, genai.LLMPipeline(path, "CPU", **properties, **lookup), properties, options["mode"]
    )


class Contestant:
    def __init__(self, path: str, pipeline: Any, properties: dict[str, Any], mode: str) -> None:
        self.path = path
        self.pipeline = pipeline
        self.properties = properties
        self.mode = mode
        self._compiled: Any = None

    def generate(
        self, prompt: list[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        seconds: list[float] = []

        class Stamps(genai.StreamerBase):  # type: ignore[misc]
            """Records the time of each token."""

            def write(self, tokens: Any) -> Any:
                new = len(tokens) if isinstance(tokens, list) else 1
                seconds.extend([time.perf_counter() - started] * new)
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                """Do nothing, because no token is held back."""

        config = genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos = True
        config.do_sample = temperature > 0
        if temperature:
            config.temperature = temperature
            config.top_k = 0
            config.top_p = 1.0
            config.rng_seed = 1
        if self.mode == "lookup":
            config.num_assistant_tokens = LOOKUP_TOKENS
            config.max_ngram_size = LOOKUP_NGRAM
        started = time.perf_counter()
        ids = np.array([prompt], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        out = self.pipeline.generate(inputs, config, Stamps())
        return list(out.tokens[0])[:count], seconds[:count]

    def logits(self, tokens: list[int]) -> Any:
        """Return the logits of the model in one pass. The pipeline is not used, because it returns
        no logits."""
        import numpy as np
        import openvino as ov

        if self._compiled is None:
            self._compiled = ov.Core().compile_model(
                Path(self.path) / "openvino_model.xml", "CPU", self.properties
            )
        request = self._compiled.create_infer_request()
        ids = np.array([tokens], dtype=np.int64)
        values = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        known = {name for port in self._compiled.inputs for name in port.get_names()}
        request.infer({name: value for name, value in values.items() if name in known})
        return request.get_tensor("logits").data[0]


class Batch:
    """Continuous batching."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._last = 0

    def serve(
        self, prompts: list[list[int]], counts: list[int], concurrency: int
    ) -> list[dict[str, Any]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.ignore_eos = True
        config.do_sample = False
        found: list[dict[str, Any]] = [{"tokens": [], "times": []} for _ in prompts]
        waiting = list(range(len(prompts)))
        running = dict[int, tuple[Any, float]]()
        while waiting or running:
            while waiting and len(running) < concurrency:
                number = waiting.pop(0)
                self._last = self._last + 1
                config.max_new_tokens = counts[number]
                ids = ov.Tensor(np.array([prompts[number]], np.int64))
                running[number] = (
                    self.pipeline.add_request(self._last, ids, config),
                    time.perf_counter(),
                )
            self.pipeline.step()
            for number, (handle, started) in list(running.items()):
                while handle.can_read():
                    [output] = handle.read().values()
                    found[number]["tokens"] += list(output.generated_ids)
                    found[number]["times"] += [time.perf_counter() - started] * len(
                        output.generated_ids
                    )
                if len(found[number]["tokens"]) >= counts[number]:
                    del running[number]
        return found
