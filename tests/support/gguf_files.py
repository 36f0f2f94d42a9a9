"""Writes GGUF files of tiny models. The ``gguf`` library writes them in the form in which
llama.cpp's converter writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from support.command import TEMPLATE

HIDDEN = 256
INNER = 512
HEADS = 4
KV_HEADS = 2
LAYERS = 3
EXPERTS = 3
EXPERT = 768
"""With these sizes, the products consist of whole blocks of 256. transformers cannot read experts
of other sizes."""
_RANDOM_BLOCKS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The offsets of the float16 scales in a block. These are the types to which the library cannot
quantize."""
WITHOUT_GATES = ("arcee", "nemotron", "jais2", "starcoder2")
LAYER_NORMS = ("stablelm", "nemotron", "jais2", "starcoder2")
"""Architectures whose norms subtract the mean."""
CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<|end|>"]
WORDS = ["th", "the", "Ġthe", "qu"]
MERGES = ["t h", "th e", "Ġ the", "q u"]
VOCABULARY = [*SPECIAL, *CHARACTERS, *WORDS]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": VOCABULARY,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(VOCABULARY) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
"""The metadata of the tokenizer."""
TOKENIZERS = Path(__file__).parent.parent / "data" / "gguf_tokenizers.json"
"""Texts and vocabularies with llama.cpp's token ids. ``lab/gguf_tokenizers`` writes it."""


@dataclass(frozen=True)
class Spec:
    """A file to write.

    Attributes:
        architecture: ``general.architecture``.
        matrices: Type of the linear layers.
        table: Type of the embedding table.
        tied: Whether there is no ``output.weight``.
        biases: Whether q, k and v have biases. If they do, o also has biases, except in qwen2 and
            seed_oss.
        head_dim: Size of a head.
        experts: For llama: ``together`` if all experts have joint tensors, ``apart`` if they have
            separate tensors as in old files, or empty if there are no experts.
        types: Types of individual tensors.
        metadata: Keys to add. A key whose value is None is removed.
        tensors: Tensors to add. A tensor whose value is None is removed.
    """

    architecture: str = "llama"
    matrices: str = "F32"
    table: str = "F32"
    tied: bool = False
    biases: bool = False
    head_dim: int = 64
    experts: str = ""
    types: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, NDArray[Any] | None] = field(default_factory=dict)


def write(path: Path, spec: Spec, seed: int = 0, most: int = 0) -> Path:
    """Write a file with random weights and a byte-level tokenizer of :data:`VOCABULARY`. If
    ``most`` is given, several files of at most this number of tensors are written. Returns the
    (first) file."""
    writer = gguf.GGUFWriter(path, spec.architecture, split_max_tensors=most)
    add_metadata(writer, _metadata(spec) | dict(spec.metadata))
    random = np.random.default_rng(seed)
    for name, shape in _shapes(spec).items():
        floats = ("gate_inp", "shortconv.conv", ".bias")
        matrix = len(shape) >= 2 and not any(part in name for part in floats)
        kind = spec.types.get(name, spec.matrices if matrix else "F32")
        if name == "token_embd.weight":
            kind = spec.types.get(name, spec.table)
        data, raw = stored(random, name, shape, kind)
        if name not in spec.tensors:
            writer.add_tensor(name, data, raw_dtype=raw)
    for name, tensor in spec.tensors.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    finish(writer)
    if most:
        return min(path.parent.glob(f"{path.stem}-*.gguf"))
    return path


def stored(
    random: np.random.Generator, name: str, shape: tuple[int, ...], kind: str
) -> tuple[NDArray[Any], Any]:
    """Returns a stored tensor with random values, and its type."""
    values = random.normal(
        "norm" in name, 0.3 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1]), shape
    ).astype(np.float32)
    if kind in _RANDOM_BLOCKS:
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
        for offset in _RANDOM_BLOCKS[kind]:
            scales = random.uniform(1e-4, 2e-4, (*blocks.shape[:-1], 1)).astype(np.float16)
            blocks[..., offset : offset + 2] = scales.view(np.uint8)
        return blocks.reshape(*shape[:-1], -1), gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16), None
    return gguf.quantize(values, gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind]


def _metadata(spec: Spec) -> dict[str, Any]:
    own: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-3,
        "rope.freq_base": 50000.0,
    }
    if spec.architecture == "lfm2":
        own |= {"attention.head_count_kv": [0, KV_HEADS, 0], "shortconv.l_cache": 3}
    if spec.architecture in LAYER_NORMS:
        own["attention.layer_norm_epsilon"] = own.pop("attention.layer_norm_rms_epsilon")
        own["rope.dimension_count"] = spec.head_dim
    if spec.architecture == "stablelm":
        own["use_parallel_residual"] = False
    if spec.architecture == "gpt-oss":
        own |= {"expert_feed_forward_length": INNER, "attention.sliding_window": 4}
    if spec.architecture == "llama":
        own |= {"rope.dimension_count": spec.head_dim, "vocab_size": len(VOCABULARY)}
    if spec.experts or spec.architecture == "qwen3moe":
        own |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if spec.architecture == "qwen3moe":
        own["expert_feed_forward_length"] = EXPERT
    if spec.head_dim * HEADS != HIDDEN:
        own |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    return {f"{spec.architecture}.{key}": value for key, value in own.items()} | TOKENIZER


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write a file with only metadata. Names without a dot are in ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(path, "llama")
    named = {key if "." in key else f"tokenizer.ggml.{key}": metadata[key] for key in metadata}
    add_metadata(writer, named)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def digest(ids: Sequence[int]) -> str:
    """Returns a short hash of token ids."""
    return sha256(str(list(ids)).encode()).hexdigest()[:6]


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add metadata to a file. Values of None are left out."""
    kinds: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in metadata.items():
        if value is not None:
            kinds.get(type(value), writer.add_array)(key, value)


def _shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes [out, in] of all tensors by their names in the file."""
    queries = HEADS * spec.head_dim
    keys = KV_HEADS * spec.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (queries, HIDDEN),
        "attn_k.weight": (keys, HIDDEN),
        "attn_v.weight": (keys, HIDDEN),
        "attn_output.weight": (HIDDEN, queries),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    if spec.architecture in ("qwen3", "qwen3moe", "gemma3"):
        block |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    if spec.architecture == "lfm2":
        block |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    if spec.architecture == "phi3":
        for part in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
            del block[f"{part}.weight"]
        block |= {
            "attn_qkv.weight": (queries + 2 * keys, HIDDEN),
            "ffn_up.weight": (2 * INNER, HIDDEN),
        }
    if spec.experts or spec.architecture == "qwen3moe":
        inner = INNER if spec.experts else EXPERT
        for part, shape in (
            ("gate", (inner, HIDDEN)),
            ("up", (inner, HIDDEN)),
            ("down", (HIDDEN, inner)),
        ):
            del block[f"ffn_{part}.weight"]
            if spec.experts == "apart":
                block |= {f"ffn_{part}.{expert}.weight": shape for expert in range(EXPERTS)}
            else:
                block[f"ffn_{part}_exps.weight"] = (EXPERTS, *shape)
        block["ffn_gate_inp.weight"] = (EXPERTS, HIDDEN)
    if spec.architecture in WITHOUT_GATES:
        del block["ffn_gate.weight"]
    if spec.architecture in LAYER_NORMS:
        block |= {"attn_norm.bias": (HIDDEN,), "ffn_norm.bias": (HIDDEN,)}
    if spec.architecture == "gpt-oss":
        block["post_attention_norm.weight"] = block.pop("ffn_norm.weight")
        block |= {"attn_sinks.weight": (HEADS,), "ffn_gate_inp.bias": (EXPERTS,)}
        for part, size in {"gate": INNER, "up": INNER, "down": HIDDEN}.items():
            block[f"ffn_{part}_exps.bias"] = (EXPERTS, size)
    if spec.architecture == "seed_oss":
        block["post_attention_norm.weight"] = block.pop("ffn_norm.weight")
    if spec.architecture in ("gemma2", "gemma3"):
        block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    if spec.biases:
        block |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if spec.architecture not in ("qwen2", "seed_oss"):
            block["attn_output.bias"] = (HIDDEN,)
    table = (len(VOCABULARY), HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": table,
        "output_norm.weight": (HIDDEN,),
    }
    if not spec.tied:
        shapes["output.weight"] = table
    if spec.architecture in LAYER_NORMS:
        shapes["output_norm.bias"] = (HIDDEN,)
    found = shapes | {
        f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in block.items()
    }
    if spec.architecture == "lfm2":
        return _convolving(found)
    return found


def _convolving(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of LFM2. Short convolutions replace the attention in all layers except the
    second."""
    found = {"token_embd_norm.weight": shapes["output_norm.weight"]}
    for name, shape in shapes.items():
        attends = name.startswith("blk.1.") or "attn_norm" in name
        if name != "output_norm.weight" and (".attn_" not in name or attends):
            found[name] = shape
    for layer in (0, 2):
        found[f"blk.{layer}.shortconv.conv.weight"] = (HIDDEN, 3)
        found[f"blk.{layer}.shortconv.in_proj.weight"] = (3 * HIDDEN, HIDDEN)
        found[f"blk.{layer}.shortconv.out_proj.weight"] = (HIDDEN, HIDDEN)
    return found
