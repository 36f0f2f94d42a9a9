"""Tests of the kernels for GPUs in Triton's interpreter. They cover products with quantized
weights, fused blocks, and engines that use both.

torch for GPUs on Linux includes Triton. Without Triton, only the dequantization of weights is
tested.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import export_engine
from support.quantized_products import CASES
from support.started_ranks import codes, started

from eesd.common.manifest import load_manifest
from eesd.common.quantization import UNQUANTIZED
from eesd.runtime.engines import torch_quantized, torch_weights

SUPPORT = Path(__file__).parent.parent / "support"
INTERPRETED, FUSED_RANK, COMPILED = (
    SUPPORT / f"{name}.py" for name in ("interpreted", "fused_rank", "compiled_kernel")
)
fault_of_kernel = torch_quantized.fault_of_kernel.__wrapped__
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def quantized(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 engine directory. It has packed layers, biases, a tied LM head, and a copy of the
    LM head for the draft."""
    output = tmp_path_factory.mktemp("quantized") / "plans"
    options = (
        "--dtype",
        "float16",
        "--max-seq-len",
        64,
        "--quantize",
        "int4",
        "--quantize-head",
        "int8",
    )
    return export_engine(family_dir("qwen2.5-tied"), output, *options)


@pytest.fixture(scope="module")
def plain(
    family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Engine directories whose verify graphs have no quantized weights. The models have norms of
    queries and keys, heads of size 24, or one KV head. In one of the directories, the draft
    consists of all layers in 4 bits."""
    root = tmp_path_factory.mktemp("plain")
    options = ("--dtype", "float16", "--max-seq-len", 256)
    names = ("qwen3-bias", "llama-head-dim", "mistral")
    made = [export_engine(family_dir(name), root / name, *options) for name in names]
    return [
        *made,
        export_engine(family_dir("qwen2"), root / "whole", *options, "--exit-head", "quantized"),
    ]


def run(script: Path, *arguments: object) -> Any:
    command = [*map(str, (sys.executable, script, *arguments))]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(quantized: Path, plain: list[Path]) -> dict[str, Any]:
    """The results of ``support/interpreted.py``."""
    found: dict[str, Any] = run(INTERPRETED, quantized, *plain)
    return found


@NEEDS_TRITON
def test_products_are_those_of_the_dequantized_weights(found: dict[str, Any]) -> None:
    """A row's bits do not depend on the number of rows."""
    assert len(found["products"]) == len(CASES)
    for name, product in found["products"].items():
        assert product["error"] <= 1 and product["rows do not depend on each other"], name


@NEEDS_TRITON
def test_the_likeliest_tokens_are_torchs_and_of_equal_ones_the_first(found: dict[str, Any]) -> None:
    assert len(found["best"]) == 6 and max(found["best"]) < 1e-4


@NEEDS_TRITON
@pytest.mark.parametrize("kind", ["none", "int4"])
def test_ranks_compute_with_kernels_what_they_compute_with_torchs_operators(
    family_dir: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Each rank fuses its parts of the blocks, with biases, and keeps its parts of the levels. If a
    rank would begin within a block of levels, as in the 96 inputs of the MLP's last layer, the
    levels are dequantized."""
    options = (
        "--dtype",
        "float16",
        "--max-seq-len",
        64,
        "--quantize",
        kind,
        "--quantize-draft",
        kind,
    )
    directory = export_engine(family_dir("qwen3-bias"), tmp_path / "plans", *options)
    with started(tmp_path, FUSED_RANK, directory) as processes:
        assert codes(processes, 600) == [0, 0], (tmp_path / "0.err").read_text()[-2000:]
    found = json.loads((tmp_path / "0.out").read_text())
    for difference, deviation in zip(found["difference"], found["deviation"], strict=True):
        assert deviation > 0.3 and difference < 0.05, "logits near zero would always agree"
    verify, draft = found["fused"]
    assert verify == load_manifest(directory).geometry.num_layers > draft > 0
    assert found["shared"][:draft] == [True] * draft, "the joined weights are stored once"
    layers = {
        "self_attn.q_proj": [2, 64],
        "self_attn.o_proj": [1, 64],
        "mlp.gate_proj": [2, 96],
    }
    kept = {
        f"model.layers.{index}.{name}": shape
        for index in range(verify)
        for name, shape in layers.items()
    }
    kept |= {"exit_head.blocks.0.self_attn.k_proj": [2, 32], "lm_head": [2, 97]}
    assert found["levels"] == (kept if kind == "int4" else {})


@NEEDS_TRITON
def test_engines_compute_with_kernels_what_they_compute_with_torchs_operators(
    found: dict[str, Any],
) -> None:
    """The results agree for prompts, chains, trees and several rows. This holds with kept levels
    and with fused blocks. If all levels are kept, calls of any number of nodes have equal bits."""
    assert len(found["engines"]) == 5 and found["bits"] == [True, None, None, None, None]
    for engines in found["engines"]:
        assert len(engines["difference"]) == 9
        for difference, deviation in zip(engines["difference"], engines["deviation"], strict=True):
            assert deviation > 0.2 and difference < 0.05, "logits near zero would always agree"


@NEEDS_TRITON
def test_draft_and_verify_keep_their_levels_in_the_same_memory(found: dict[str, Any]) -> None:
    """Only the LM head of the draft is a copy, and this copy has fewer bits."""
    engines = found["engines"][0]
    head = "exit_head.blocks.0"
    layers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    blocks = [
        [f"{block}.{layer}" for layer in layers]
        for block in (head, *(f"model.layers.{i}" for i in range(4)))
    ]
    others = [name for names in blocks[1:] for name in names]
    assert engines["draft"] == sorted([*blocks[0], "lm_head", *blocks[1]])
    assert engines["verify"] == sorted([f"{head}.self_attn.k_proj", "lm_head", *others])
    assert engines["shared"] == sorted(blocks[1]) and engines["dequantized"] == [0, 0]
    assert not any(plain["verify"] for plain in found["engines"][1:])
    whole = found["engines"][4]
    assert whole["draft"] == sorted(
        ["lm_head", *(f"model.layers.{i}.{layer}" for i in range(3) for layer in layers)]
    )
    assert whole["dequantized"] == [0, 0] and not whole["shared"]


@NEEDS_TRITON
def test_the_kernels_compile_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every number of groups, a kernel uses the same products, and fits the shared memory of
    the smallest GPUs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = run(COMPILED)
    compiled = found["products"]
    assert len(compiled) == 4 and len(found["others"]) == 14
    # These are the sizes of shared memory at compute capability 8.6 and 9.0.
    assert max(found["others"][::2]) <= 99 * 1024 and max(found["others"][1::2]) <= 227 * 1024
    for name, kernel in compiled.items():
        assert kernel["shared"] <= 99 * 1024, name
        assert list(kernel["products"]) == [
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        ], name


def test_kernels_are_used_where_a_gpu_has_them(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_weights, "fault_of_kernel", lambda device, dtype: None)
    manifest = load_manifest(quantized)
    cuda = torch.device("cuda")
    whole = replace(manifest, quantization=UNQUANTIZED)
    works = torch_weights.has_kernels
    assert works(manifest, cuda) and works(whole, cuda) and not works(manifest, torch.device("cpu"))
    assert not works(replace(manifest, dtype="float32"), cuda)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(
        torch_weights, "fault_of_kernel", lambda device, dtype: "Triton is not installed"
    )
    assert not works(manifest, cuda) and not works(whole, cuda)
    assert capsys.readouterr().err == (
        "The GPU works slowly, and the quantized weights take the memory of float16 weights: "
        "Triton is not installed.\n"
        "The GPU works slowly: Triton is not installed.\n"
    )


def fails(*_: object) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify one.")


def weights(weight: torch_quantized.QuantizedWeight) -> torch.Tensor:
    """Returns the weight [in, out], dequantized from words of 4-bit levels as the format defines
    it."""
    blocks, outputs = weight.scales.shape
    levels = [
        [
            int(weight.levels[0, i // 128, o, i % 16]) >> i % 128 // 16 * 4 & 15
            for o in range(outputs)
        ]
        for i in range(32 * blocks)
    ]
    return (torch.tensor(levels).float() - weight.middle) * weight.scales.float().repeat_interleave(
        32, 0
    )


@pytest.mark.parametrize(
    ("product", "fault"),
    [
        (fails, "Triton fails on it (Failed to find C compiler.)"),
        (lambda x, weight: 1 + x @ weights(weight).to(x.dtype), "Triton multiplies wrongly on it"),
        (lambda x, weight: x @ weights(weight).to(x.dtype), None),
    ],
)
def test_the_kernel_is_tried_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, product: Any, fault: str | None
) -> None:
    monkeypatch.setattr(torch_quantized, "product", product)
    assert fault_of_kernel(torch.device("cpu"), torch.float16) == fault


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "eesd.runtime.engines.torch_kernel", raising=False)
    assert fault_of_kernel(torch.device("cpu"), torch.float16) == "Triton is not installed"
