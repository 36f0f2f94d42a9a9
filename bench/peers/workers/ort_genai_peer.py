"""onnxruntime-genai, with models of its own builder. Its speculative decoding needs a second model, so only plain decoding."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGE = "onnxruntime-genai"


def convert(model: str, output: str, variant: str) -> None:
    """By its model builder, with the builder's defaults for the CPU."""
    with tempfile.TemporaryDirectory() as cache:
        builder = ["-m", "onnxruntime_genai.models.builder", "-i", model, "-o", output, "-p", variant, "-e", "cpu", "-c", cache]
        subprocess.run([sys.executable, *builder], check=True, stdout=sys.stderr)


def load(path: str, options: dict[str, Any]) -> "Contestant":
    import onnxruntime_genai as genai

    # There must be an EOS, and to ignore it is no option: the last id of the vocabulary, which is hardly ever generated, is it.
    vocab = json.loads((Path(path) / "genai_config.json").read_text("utf-8"))["model"]["vocab_size"]
    session = {"intra_op_num_threads": options["threads"]}
    config = genai.Config(path)
    config.overlay(json.dumps({"model": {"eos_token_id": vocab - 1, "decoder": {"session_options": session}}}))
    return Contestant(genai.Model(config))


class Contestant:
    def __init__(self, model: Any) -> None:
        self.model = model

    def _generator(self, slots: int) -> Any:
        import onnxruntime_genai as genai

        params = genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, max_length=slots)
        return genai.Generator(self.model, params)

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        seconds: list[float] = []
        started = time.perf_counter()
        generator = self._generator(len(prompt) + count)
        generator.append_tokens(prompt)
        while len(tokens) < count:
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            seconds.append(time.perf_counter() - started)
            if generator.is_done() and len(tokens) < count:
                raise RuntimeError("generated the id that stands for EOS")
        return tokens, seconds

    def logits(self, tokens: list[int]) -> Any:
        generator = self._generator(len(tokens) + 1)
        generator.append_tokens(tokens)
        found = generator.get_output("logits")
        return found[0] if found.shape[1] == len(tokens) else None
