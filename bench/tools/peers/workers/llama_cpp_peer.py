"""llama.cpp by llama-cpp-python. Plain decoding calls llama.cpp directly; prompt lookup is that of llama-cpp-python."""

import ctypes
import json
import time
from pathlib import Path
from typing import Any

PACKAGE = "llama-cpp-python"
FILE = "model.gguf"
LOOKUP_TOKENS = 2
"""What its documentation advises for machines without a GPU."""
LEAST_TOKENIZER: dict[str, Any] = {
    "model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "added_tokens": [],
}
"""llama.cpp loads no model without a tokenizer; made-up weights have none."""


def convert(model: str, output: str, variant: str) -> None:
    """Write the model as GGUF of a type, by llama.cpp's quantizer, without an importance matrix; a given file as ``gguf``.

    The quantizer reads any GGUF file, and turns its values to float32 first. A checkpoint is written as such a file.
    """
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    file, source = directory / FILE, Path(model)
    if variant == "gguf":
        file.symlink_to(source)
        return
    import llama_cpp

    if source.is_dir():
        source = directory / "whole.gguf"
        write_gguf(Path(model), source)
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32 if variant == "F32" else getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{variant}")
    params.allow_requantize, params.nthread = True, 2
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params)):
        raise RuntimeError("llama_model_quantize failed")
    if source.parent == directory:
        source.unlink()


def write_gguf(model: Path, output: Path) -> None:
    """Write a Llama checkpoint as GGUF: float16 where the checkpoint is, else float32.

    The tokenizer is written as far as llama.cpp needs it to load: the benchmark gives token ids.
    """
    import gguf

    config = json.loads((model / "config.json").read_text("utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default" or config.get("attention_bias"):
        raise RuntimeError(f"this converter writes plain Llamas; convert with llama.cpp's convert_hf_to_gguf.py to {FILE}")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(output, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in read_tensors(model):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, heads if "q_proj" in name else kv_heads)
        own_name = names.get_name(name, try_suffixes=(".weight",))
        assert own_name is not None
        writer.add_tensor(own_name, tensor if tensor.ndim > 1 else tensor.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, model: Path, config: dict[str, Any]) -> None:
    """Vocabulary and merges of ``tokenizer.json``, if the model has one; ids without a token get a placeholder."""
    import gguf

    path = model / "tokenizer.json"
    stored = json.loads(path.read_text("utf-8")) if path.exists() else LEAST_TOKENIZER
    tokens = [f"[UNUSED{index}]" for index in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * config["vocab_size"]
    for token, index in stored["model"]["vocab"].items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for added in stored["added_tokens"]:
        if added["id"] < len(tokens):
            tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"].get("merges", [])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for name, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if isinstance(config.get(name), int):
            add(config[name])


def read_tensors(model: Path) -> Any:
    """Name and array of each weight of the checkpoint; bfloat16, which numpy has not, in float32."""
    import torch
    from safetensors import safe_open

    index = model / "model.safetensors.index.json"
    whole = {"weight_map": {"": "model.safetensors"}}
    files = json.loads(index.read_text("utf-8")) if index.exists() else whole
    for file in sorted(set(files["weight_map"].values())):
        with safe_open(model / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                tensor = tensors.get_tensor(name)
                yield name, (tensor if tensor.dtype == torch.float16 else tensor.to(torch.float32)).numpy()


def interleave(weight: Any, heads: int) -> Any:
    """Reorder the rows of a head: GGUF has the two rows that rotate together side by side, Hugging Face half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


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
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
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
        """Fill the cache from a position on, with the logits of the last token. Gives the seconds."""
        lib = self.lib
        started = time.perf_counter()
        lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), 0, start, -1)
        ids = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(tokens))):
            raise RuntimeError("llama_decode failed")
        return time.perf_counter() - started

    def passes(self, rows: int, behind: int, count: int) -> list[float]:
        """Seconds of passes over so many tokens, each with its logits; the cache stays as it was."""
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
        lib, model = self.lib, self.model
        width = lib.llama_model_n_embd(model) // lib.llama_model_n_head(model) * lib.llama_model_n_head_kv(model)
        return int(2 * 2 * lib.llama_model_n_layer(model) * width)

    def _batch(self, tokens: list[int], start: int) -> Any:
        """Tokens from a position on that all get logits."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token, start + index, 1
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        return batch

    def logits(self, tokens: list[int]) -> Any:
        import numpy as np

        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        batch = self._batch(tokens, 0)
        if lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        rows = [np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, i), (vocab,)) for i in range(len(tokens))]
        found = np.stack(rows)
        lib.llama_batch_free(batch)
        return found


class Lookup:
    """Prompt lookup decoding of llama-cpp-python."""

    def __init__(self, file: str, options: dict[str, Any]) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        threads, slots = options["threads"], options["slots"]
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
