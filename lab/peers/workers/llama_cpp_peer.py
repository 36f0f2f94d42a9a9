"""llama.cpp by llama-cpp-python. Plain decoding calls llama.cpp directly; prompt lookup is that of
llama-cpp-python."""

import ctypes
import time
from pathlib import Path
from typing import Any

PACKAGE = "llama-cpp-python"
FILE = "model.gguf"
LOOKUP_TOKENS = 2
"""What its documentation advises for machines without a GPU."""


def convert(model: str, output: str, variant: str) -> None:
    """Write the model as GGUF of a type, by llama.cpp's quantizer, without an importance matrix; a
    given file as ``gguf``.

    The quantizer reads any GGUF file, and turns its values to float32 first.
    """
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    if variant == "gguf":
        file.symlink_to(model)
        return
    import llama_cpp

    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = (
        llama_cpp.LLAMA_FTYPE_ALL_F32
        if variant == "F32"
        else getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{variant}")
    )
    params.allow_requantize = True
    params.nthread = 2
    if llama_cpp.llama_model_quantize(model.encode(), str(file).encode(), ctypes.byref(params)):
        raise RuntimeError("llama_model_quantize failed")


def load(path: str, options: dict[str, Any]) -> "Plain | Lookup":
    file = str(Path(path) / FILE)
    return Lookup(file, options) if options["mode"] == "lookup" else Plain(file, options)


class Plain:
    """The calls that llama.cpp's own programs make: decode, and sample greedily in C."""

    def __init__(self, file: str, options: dict[str, Any]) -> None:
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = options["slots"]
        params.n_threads = params.n_threads_batch = options["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self.sampler = llama_cpp.llama_sampler_init_greedy()

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        lib = self.lib
        tokens: list[int] = []
        seconds: list[float] = []
        started = time.perf_counter()
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        pending = prompt
        while True:
            ids = (lib.llama_token * len(pending))(*pending)
            if lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(pending))):
                raise RuntimeError("llama_decode failed")
            pending = [lib.llama_sampler_sample(self.sampler, self.context, -1)]
            tokens += pending
            seconds.append(time.perf_counter() - started)
            if len(tokens) == count:
                return tokens, seconds

    def prefill(self, tokens: list[int], start: int) -> float:
        """Fill the cache from a position on, with the logits of the last token. Gives the
        seconds."""
        lib = self.lib
        started = time.perf_counter()
        lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), 0, start, -1)
        ids = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(tokens))):
            raise RuntimeError("llama_decode failed")
        return time.perf_counter() - started

    def passes(self, rows: int, behind: int, count: int) -> list[float]:
        """Seconds of ``count`` passes over ``rows`` tokens, which give the logits of each token.
        The cache stays as it was."""
        lib, memory = self.lib, self.lib.llama_get_memory(self.context)
        seconds = []
        for _ in range(count):
            lib.llama_memory_seq_rm(memory, 0, behind, -1)
            batch = self._batch([7] * rows, behind)
            started = time.perf_counter()
            if lib.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            lib.llama_get_logits(self.context)  # waits for them
            seconds.append(time.perf_counter() - started)
            lib.llama_batch_free(batch)
        return seconds

    def slot_bytes(self) -> int:
        """Bytes of keys and values of a token; llama.cpp keeps them in float16."""
        lib = self.lib
        model = self.model
        width = (
            lib.llama_model_n_embd(model)
            // lib.llama_model_n_head(model)
            * lib.llama_model_n_head_kv(model)
        )
        return int(2 * 2 * lib.llama_model_n_layer(model) * width)

    def _batch(self, tokens: list[int], start: int) -> Any:
        """Tokens from a position on that all get logits."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.logits[index] = 1
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
        return batch

    def logits(self, tokens: list[int]) -> Any:
        import numpy as np

        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        batch = self._batch(tokens, 0)
        if lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        rows = [
            np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, i), (vocab,))
            for i in range(len(tokens))
        ]
        found = np.stack(rows)
        lib.llama_batch_free(batch)
        return found


class Lookup:
    """Prompt lookup decoding of llama-cpp-python."""

    def __init__(self, file: str, options: dict[str, Any]) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        threads = options["threads"]
        slots = options["slots"]
        self.llama = Llama(
            file,
            n_ctx=slots,
            n_batch=slots,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS),
            verbose=False,
        )

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        seconds: list[float] = []
        self.llama.reset()
        started = time.perf_counter()
        for token in self.llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            seconds.append(time.perf_counter() - started)
            if len(tokens) == count:
                break
        return tokens, seconds

    def logits(self, tokens: list[int]) -> None:
        """Those of plain decoding; they are measured once."""


def _drop(level: int, text: bytes, data: int) -> None:
    """llama.cpp's log, which is long, goes nowhere."""


SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_drop)
"""Kept for the life of the process: llama.cpp calls it."""
