"""ik_llama.cpp, through the C functions of the package ik-llama-cpp-python: plain, or plain with
weights repacked at load (``rtr``). The package cannot draft."""

import time
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "ik-llama-cpp-python"
FILE = "model.gguf"


def convert(model: str, output: str, _: str) -> None:
    """Link to the file."""
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
            self._decode(pending, len(prompt) + len(tokens) - len(pending), every=False)
            pending = [int(self._logits(len(pending) - 1).argmax())]
            tokens += pending
            seconds.append(time.perf_counter() - started)
            if len(tokens) == count:
                return tokens, seconds

    def logits(self, tokens: list[int]) -> Any:
        self.lib.llama_kv_cache_clear(self.context)
        self._decode(tokens, 0, every=True)
        return np.stack([self._logits(index).copy() for index in range(len(tokens))])

    def _logits(self, index: int) -> Any:
        row = self.lib.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(row, (self.vocab,))

    def _decode(self, tokens: list[int], start: int, every: bool) -> None:
        """Compute tokens from a position on, with the logits of every token or of the last."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.logits[index] = every or index == len(tokens) - 1
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
        failed = self.lib.llama_decode(self.context, batch)
        self.lib.llama_batch_free(batch)
        if failed:
            raise RuntimeError("llama_decode failed")


load = Contestant
