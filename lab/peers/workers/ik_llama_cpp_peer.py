"""ik_llama.cpp through the C functions of the package ik-llama-cpp-python. It decodes plainly. With
the mode ``rtr``, it repacks the weights when it loads them. The package cannot draft."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from llama_decode import decode

PACKAGE = "ik-llama-cpp-python"
FILE = "model.gguf"


def convert(model: str, output: str, _: str) -> None:
    """Make a link to the file."""
    Path(output).mkdir(parents=True, exist_ok=True)
    (Path(output) / FILE).symlink_to(model)


class Contestant:
    def __init__(self, path: str, options: dict[str, Any]) -> None:
        from ik_llama_cpp import _ctypes_api

        self.lib: Any = _ctypes_api
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        params.repack_tensors = options["mode"] == "rtr"
        params.use_mmap = not params.repack_tensors
        self.model = self.lib.llama_model_load_from_file(str(Path(path, FILE)).encode(), params)
        sizes = self.lib.llama_context_default_params()
        sizes.n_ctx = options["slots"]
        sizes.n_batch = options["slots"]
        sizes.n_threads = options["threads"]
        sizes.n_threads_batch = options["threads"]
        sizes.flash_attn = False  # as the package does
        self.context = self.lib.llama_init_from_model(self.model, sizes)
        if not self.context:
            raise RuntimeError(f"ik_llama.cpp cannot load {path}")
        self.vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def generate(
        self, prompt: list[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        if temperature:
            raise RuntimeError("is measured greedily alone")
        tokens: list[int] = []
        seconds: list[float] = []
        self.lib.llama_kv_cache_clear(self.context)
        started = time.perf_counter()
        pending = prompt
        while True:
            decode(
                self.lib,
                self.context,
                pending,
                len(prompt) + len(tokens) - len(pending),
                every=False,
            )
            pending = [int(self._logits(len(pending) - 1).argmax())]
            tokens += pending
            seconds.append(time.perf_counter() - started)
            if len(tokens) == count:
                return tokens, seconds

    def logits(self, tokens: list[int]) -> Any:
        self.lib.llama_kv_cache_clear(self.context)
        decode(self.lib, self.context, tokens, 0, every=True)
        return np.stack([self._logits(index).copy() for index in range(len(tokens))])

    def _logits(self, index: int) -> Any:
        row = self.lib.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(row, (self.vocab,))


load = Contestant
