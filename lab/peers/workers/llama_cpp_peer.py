"""llama.cpp from the package xllamacpp. Plain decoding uses its C functions, and n-gram drafts from
the text (``ngram``) use its server."""

import ctypes
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from llama_decode import decode

PACKAGE = "xllamacpp"
FILE = "model.gguf"
NGRAM = "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE"
NGRAM_SIZES = {"size_n": 4, "size_m": 8}
"""The number of tokens that must repeat, and the maximum number of drafted tokens. The server's
defaults are 12 and 48, with which texts of less than a hundred tokens are hardly ever drafted."""
CONTEXT = (512, 2048, 512, 1, 0, 0, 1, 4, 4)
"""The first values of llama_context_default_params(). They are n_ctx, n_batch, n_ubatch, n_seq_max,
three others, n_threads and n_threads_batch."""


class Struct(ctypes.Structure):
    """Room for parameters of llama.cpp, which are passed on as received."""

    _fields_ = [("values", ctypes.c_int32 * 256)]


class BatchStruct(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def convert(model: str, output: str, _: str) -> None:
    """Make a link to the file."""
    Path(output).mkdir(parents=True, exist_ok=True)
    (Path(output) / FILE).symlink_to(model)


def load(path: str, options: dict[str, Any]) -> "Plain | Server":
    """Load the model. If the option ``rows`` is given, a server with ``rows`` slots is returned."""
    file = str(Path(path) / FILE)
    if "rows" in options or options["mode"] == "ngram":
        return Server(file, options)
    return Plain(file, options)


def library() -> ctypes.CDLL:
    """Return llama.cpp's C functions, which the Python module exports."""
    import xllamacpp

    pointer = ctypes.c_void_p
    lib = ctypes.CDLL(str(Path(xllamacpp.__file__).with_name("xllamacpp.abi3.so")))
    for name, result, arguments in (
        ("llama_model_default_params", Struct, []),
        ("llama_context_default_params", Struct, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Struct]),
        ("llama_init_from_model", pointer, [pointer, Struct]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        ("llama_memory_seq_rm", ctypes.c_bool, [pointer, *[ctypes.c_int32] * 3]),
        ("llama_batch_init", BatchStruct, [ctypes.c_int32] * 3),
        ("llama_batch_free", None, [BatchStruct]),
        ("llama_decode", ctypes.c_int32, [pointer, BatchStruct]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [pointer]),
        ("llama_sampler_chain_default_params", ctypes.c_bool, []),
        ("llama_sampler_chain_init", pointer, [ctypes.c_bool]),
        ("llama_sampler_chain_add", None, [pointer, pointer]),
        ("llama_sampler_init_greedy", pointer, []),
        ("llama_sampler_init_temp", pointer, [ctypes.c_float]),
        ("llama_sampler_init_dist", pointer, [ctypes.c_uint32]),
        ("llama_sampler_sample", ctypes.c_int32, [pointer, pointer, ctypes.c_int32]),
        ("llama_model_n_embd", ctypes.c_int32, [pointer]),
        ("llama_model_n_head", ctypes.c_int32, [pointer]),
        ("llama_model_n_head_kv", ctypes.c_int32, [pointer]),
        ("llama_model_n_layer", ctypes.c_int32, [pointer]),
        ("llama_log_set", None, [pointer, pointer]),
    ):
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    lib.llama_log_set(ctypes.cast(SILENT, pointer), None)
    return lib


class Plain:
    """Makes the calls that llama.cpp's own programs make. It decodes, and samples in C."""

    def __init__(self, file: str, options: dict[str, Any]) -> None:
        self.lib = library()
        params = self.lib.llama_context_default_params()
        if tuple(params.values[: len(CONTEXT)]) != CONTEXT:
            raise RuntimeError("this version of llama.cpp has other parameters of a context")
        slots = options["slots"]
        threads = options["threads"]
        params.values[: len(CONTEXT)] = (slots, slots, *CONTEXT[2:7], threads, threads)
        self.model = self.lib.llama_model_load_from_file(
            file.encode(), self.lib.llama_model_default_params()
        )
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self.memory = self.lib.llama_get_memory(self.context)

    def generate(
        self, prompt: list[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        lib = self.lib
        tokens: list[int] = []
        seconds: list[float] = []
        sampler = self._sampler(temperature)
        lib.llama_memory_clear(self.memory, True)
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
            pending = [lib.llama_sampler_sample(sampler, self.context, -1)]
            tokens += pending
            seconds.append(time.perf_counter() - started)
            if len(tokens) == count:
                return tokens, seconds

    def prefill(self, tokens: list[int], start: int) -> float:
        """Fill the cache from position ``start`` on, and compute the logits of the last token.
        Returns the seconds."""
        started = time.perf_counter()
        self.lib.llama_memory_seq_rm(self.memory, 0, start, -1)
        decode(self.lib, self.context, tokens, start, every=False)
        self.lib.llama_get_logits_ith(self.context, -1)
        return time.perf_counter() - started

    def passes(self, rows: int, behind: int, count: int) -> list[float]:
        """Return the seconds of ``count`` passes over ``rows`` tokens. A pass gives the logits of
        each token. The cache stays as it was."""
        seconds = []
        for _ in range(count):
            self.lib.llama_memory_seq_rm(self.memory, 0, behind, -1)
            started = time.perf_counter()
            decode(self.lib, self.context, [7] * rows, behind, every=True)
            self.lib.llama_get_logits_ith(self.context, 0)
            seconds.append(time.perf_counter() - started)
        return seconds

    def slot_bytes(self) -> int:
        """Return the bytes of a token's keys and values. llama.cpp keeps them in float16."""
        lib = self.lib
        heads = lib.llama_model_n_head(self.model)
        width = lib.llama_model_n_embd(self.model) // heads * lib.llama_model_n_head_kv(self.model)
        return int(2 * 2 * lib.llama_model_n_layer(self.model) * width)

    def logits(self, tokens: list[int]) -> Any:
        lib = self.lib
        lib.llama_memory_clear(self.memory, True)
        decode(self.lib, self.context, tokens, 0, every=True)
        vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        rows = (lib.llama_get_logits_ith(self.context, index) for index in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (vocab,)).copy() for row in rows])

    def _sampler(self, temperature: float) -> Any:
        lib = self.lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(1))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain


class Server:
    """llama.cpp's server, without HTTP."""

    def __init__(self, file: str, options: dict[str, Any]) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = file
        parameters.n_parallel = options.get("rows", 1)
        parameters.n_ctx = options["slots"] * parameters.n_parallel
        parameters.cpuparams.n_threads = options["threads"]
        parameters.cpuparams_batch.n_threads = options["threads"]
        if options["mode"] == "ngram":
            parameters.speculative.types = [getattr(xllamacpp.common_speculative_type, NGRAM)]
            for name, value in NGRAM_SIZES.items():
                setattr(parameters.speculative.ngram_simple, name, value)
        self.server = xllamacpp.Server(parameters)

    def generate(
        self, prompt: list[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        seconds: list[float] = []
        wanted = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": temperature,
            "top_k": 0,
            "top_p": 1,
            "min_p": 0,
            "seed": 1,
            "stream": True,
            "verbose": True,  # with the ids of tokens
            "ignore_eos": True,
            "cache_prompt": False,
        }
        started = time.perf_counter()

        def on_chunk(chunk: str) -> bool:
            found = json.loads(chunk)["__verbose"]
            # The ids of tokens that are only a part of a character never come.
            held = [-1] * (found["tokens_predicted"] - len(tokens) - len(found["tokens"]))
            new = [*held, *found["tokens"]]
            tokens.extend(new)
            seconds.extend([time.perf_counter() - started] * len(new))
            return False

        self.server.handle_completions(json.dumps(wanted), on_chunk)
        return tokens[:count], seconds[:count]

    def serve(
        self, prompts: list[list[int]], counts: list[int], concurrency: int
    ) -> list[dict[str, Any]]:
        def ask(prompt: list[int], count: int) -> dict[str, Any]:
            tokens, times = self.generate(prompt, count, 0.0)
            return {"tokens": tokens, "times": times}

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(ask, prompts, counts))

    def logits(self, tokens: list[int]) -> None:
        """Return None, because the logits are those of plain decoding."""


def _drop(level: int, text: bytes, data: int) -> None:
    """Drop a line of llama.cpp's long log."""


SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_drop)
"""llama.cpp can call this function as long as the process lives, so it is never freed."""
