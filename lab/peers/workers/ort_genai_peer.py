"""onnxruntime-genai with models that its builder makes. It decodes plainly or with n-gram lookup.
It does not read quantized GGUF files.

The nearest form is used: transformers dequantizes the file, and the builder quantizes it again in
blocks of 32. The weights get 4 bits if most weights of the file have about 4 bits, and zero points
if those weights have minimums.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGE = "onnxruntime-genai"
LOOKUP_NGRAM = 3
"""Length of the n-gram. Drafts keep their default limit of 4 tokens."""
MOST_BITS_OF_INT4 = 6.0
INT8 = ["block_size=32"]


def convert(model: str, output: str, _: str) -> None:
    """Run the runtime's model builder on the values of a GGUF file."""
    with tempfile.TemporaryDirectory() as cache:
        precision, extra = nearest(model)
        source = dequantized(Path(model), Path(cache) / "checkpoint")
        builder = [
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            source,
            "-o",
            output,
            "-p",
            precision,
        ]
        options = ["--extra_options", *extra] if extra else []
        subprocess.run(
            [sys.executable, *builder, "-e", "cpu", "-c", cache, *options],
            check=True,
            stdout=sys.stderr,
        )


def nearest(model: str) -> tuple[str, list[str]]:
    """Return the builder's precision and options that come closest to a GGUF file. They are chosen
    by the types of the file's layers and LM head."""
    from collections import Counter

    from gguf import GGML_QUANT_SIZES, GGUFReader

    def bits(kind: Any) -> float:
        values, size = GGML_QUANT_SIZES[kind]
        return 8 * size / values

    tensors = {tensor.name: tensor for tensor in GGUFReader(model).tensors}
    sizes: Counter[Any] = Counter()
    for name, tensor in tensors.items():
        if name.startswith("blk.") and len(tensor.shape) == 2:
            sizes[tensor.tensor_type] += int(tensor.n_elements)
    layers = sizes.most_common(1)[0][0]
    head = tensors.get("output.weight", tensors["token_embd.weight"]).tensor_type
    if bits(layers) > MOST_BITS_OF_INT4:
        return ("int8", INT8) if layers.name.startswith("Q") else ("fp32", [])
    symmetric = "true" if layers.name in ("Q4_0", "Q5_0") else "false"
    wide_head = (
        ["matmul_mixed_precision=last_matmul:int8"] if bits(head) > MOST_BITS_OF_INT4 else []
    )
    return "int4", ["block_size=32", "algo_config=k_quant", f"is_symmetric={symmetric}", *wide_head]


def dequantized(file: Path, output: Path) -> str:
    """Write a GGUF file as a float32 checkpoint. This uses transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # transformers does not save a model that it considers quantized.
    model.hf_quantizer = None
    model.config.quantization_config = None
    del model.config.quantization_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(output)
    return str(output)


def load(path: str, options: dict[str, Any]) -> "Contestant":
    import onnxruntime_genai as genai

    # There must be an EOS, and no option ignores it. The last id of the vocabulary is used as EOS,
    # because it is hardly ever generated.
    vocab = json.loads((Path(path) / "genai_config.json").read_text("utf-8"))["model"]["vocab_size"]
    session = {"intra_op_num_threads": options["threads"]}
    config = genai.Config(path)
    config.overlay(
        json.dumps({"model": {"eos_token_id": vocab - 1, "decoder": {"session_options": session}}})
    )
    return Contestant(genai.Model(config), options["mode"] == "lookup")


class Contestant:
    def __init__(self, model: Any, lookup: bool) -> None:
        self.model = model
        self.lookup = lookup

    def _generator(self, slots: int, temperature: float) -> Any:
        import onnxruntime_genai as genai

        params = genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=temperature > 0, max_length=slots)
        if temperature:
            params.set_search_options(temperature=temperature, top_p=1.0, top_k=0)
        if self.lookup:
            params.set_speculative_options(ngram_size=LOOKUP_NGRAM)
        return genai.Generator(self.model, params)

    def generate(
        self, prompt: list[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        seconds: list[float] = []
        started = time.perf_counter()
        generator = self._generator(len(prompt) + count, temperature)
        generator.append_tokens(prompt)
        while len(tokens) < count:
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            seconds.append(time.perf_counter() - started)
            if generator.is_done() and len(tokens) < count:
                raise RuntimeError("generated the id that stands for EOS")
        return tokens, seconds

    def logits(self, tokens: list[int]) -> Any:
        generator = self._generator(len(tokens) + 1, 0.0)
        generator.append_tokens(tokens)
        found = generator.get_output("logits")
        return found[0] if found.shape[1] == len(tokens) else None
