"""Writes sharded checkpoints of any size without creating the model. They are sparse files, or have
random weights."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from eesd.common.weights import model_shapes
from eesd.model.config import load_config

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float16",
}

Shapes = dict[str, tuple[int, ...]]
BYTES = 2


def write_checkpoint(directory: Path, config: dict[str, Any], shards: int, *, sparse: bool) -> Path:
    """Write a float16 checkpoint. Sparse files have their full size, take no space on the disk, and
    read as zeros."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = model_shapes(load_config(directory).geometry)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_split(shapes, shards), 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        with (directory / name).open("wb") as file:
            _write_shard(file, shard, sparse)
        weight_map |= dict.fromkeys(shard, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def _split(shapes: Shapes, shards: int) -> Iterator[Shapes]:
    names = list(shapes)
    size = -(-len(names) // shards)
    for start in range(0, len(names), size):
        yield {name: shapes[name] for name in names[start : start + size]}


def _write_shard(file: BinaryIO, shapes: Shapes, sparse: bool) -> None:
    header = {}
    end = 0
    for name, shape in shapes.items():
        start = end
        end = end + prod(shape) * BYTES
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the tensors, as safetensors does
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    if sparse:
        file.truncate(file.tell() + end)
        return
    for shape in shapes.values():
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        file.write((torch.randn(shape) * scale).half().numpy().tobytes())
