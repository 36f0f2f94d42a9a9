"""Quantized weights stay quantized in a GPU's memory: the kernel's products, in Triton's interpreter, and engines with them.

torch brings Triton along where it is made for GPUs on Linux. Without Triton, only that the weights are dequantized is tested.
"""

import importlib.util
import json
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

from eesd.common.manifest_reader import load_manifest
from eesd.common.weights import UNQUANTIZED
from eesd.runtime.engines import torch_quantized, torch_weights

INTERPRETED = Path(__file__).parent / "support/interpreted.py"
fault_of_kernel = torch_quantized.fault_of_kernel.__wrapped__
COMPILED = Path(__file__).parent / "support/compiled_kernel.py"
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def quantized(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory in float16 with packed layers, biases, a tied LM head, and a copy of that for the draft."""
    output = tmp_path_factory.mktemp("quantized") / "plans"
    options = ("--dtype", "float16", "--max-seq-len", 64, "--quantize", "int4", "--quantize-head", "int8")
    return export_engine(family_dir("qwen2.5-tied"), output, *options)


def run(script: Path, *arguments: object) -> Any:
    command = [sys.executable, script, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(quantized: Path) -> dict[str, Any]:
    """What ``support/interpreted.py`` finds."""
    found: dict[str, Any] = run(INTERPRETED, quantized)
    return found


@NEEDS_TRITON
def test_products_are_those_of_the_dequantized_weights(found: dict[str, Any]) -> None:
    assert len(found["products"]) == len(CASES)
    for name, product in found["products"].items():
        assert product["error"] <= 1, name


@NEEDS_TRITON
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(found: dict[str, Any]) -> None:
    assert all(product["rows do not depend on each other"] for product in found["products"].values())


@NEEDS_TRITON
def test_engines_compute_with_kept_levels_what_they_compute_with_dequantized_weights(found: dict[str, Any]) -> None:
    engines = found["engines"]
    for difference, deviation in zip(engines["difference"], engines["deviation"], strict=True):
        assert deviation > 0.3 and difference < 0.02, "logits near zero would always agree"
    assert all(kept == dequantized for dequantized, kept in engines["tokens"])


@NEEDS_TRITON
def test_draft_and_verify_keep_their_levels_in_the_same_memory(found: dict[str, Any]) -> None:
    """Only the LM head of the draft is a copy, in fewer bits."""
    engines, head = found["engines"], "exit_head.blocks.0"
    layers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    blocks = [[f"{block}.{layer}" for layer in layers] for block in (head, *(f"model.layers.{i}" for i in range(4)))]
    others = [name for names in blocks[1:] for name in names]
    assert engines["draft"] == sorted([*blocks[0], "lm_head", *blocks[1]])
    assert engines["verify"] == sorted([f"{head}.self_attn.k_proj", "lm_head", *others])
    assert engines["shared"] == sorted(blocks[1]) and engines["dequantized"] == [0, 0]


@NEEDS_TRITON
def test_the_kernel_compiles_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of groups is made of the same products, and fits the shared memory of the smallest GPUs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = run(COMPILED)
    assert len(compiled) == 4
    for name, kernel in compiled.items():
        assert kernel["shared"] <= 99 * 1024, name
        assert list(kernel["products"]) == ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"], name


def test_levels_are_kept_where_a_gpu_has_a_kernel_for_them(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_weights, "fault_of_kernel", lambda device, dtype: None)
    manifest, cuda = load_manifest(quantized), torch.device("cuda")
    whole = replace(manifest, quantization=UNQUANTIZED)
    keeps = torch_weights._keeps_levels
    assert keeps(manifest, cuda) and not keeps(manifest, torch.device("cpu"))
    assert not keeps(replace(manifest, dtype="float32"), cuda) and not keeps(whole, cuda)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch_weights, "fault_of_kernel", lambda device, dtype: "Triton is not installed")
    assert not keeps(manifest, cuda)
    assert (
        capsys.readouterr().err
        == "The quantized weights take the memory of float16 weights on the GPU: Triton is not installed.\n"
    )
    assert not keeps(whole, cuda) and capsys.readouterr().err == ""


def fails(*_: object) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify one.")


def adds_one(x: torch.Tensor, weight: torch_quantized.QuantizedWeight) -> torch.Tensor:
    return 1 + x @ weights(weight).to(x.dtype)


def weights(weight: torch_quantized.QuantizedWeight) -> torch.Tensor:
    """The weight [in, out] of 4-bit levels in panels, by definition."""
    apart = torch.stack((weight.levels & 15, weight.levels >> 4), -1).flatten(2).transpose(0, 1).flatten(1)
    return (apart[:, : weight.scales.shape[1]].float() - weight.middle) * weight.scales.float().repeat_interleave(32, 0)


@pytest.mark.parametrize(
    ("product", "fault"),
    [
        (fails, "Triton fails on it (Failed to find C compiler.)"),
        (adds_one, "Triton multiplies wrongly on it"),
        (lambda x, weight: x @ weights(weight).to(x.dtype), None),
    ],
)
def test_the_kernel_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch, product: Any, fault: str | None) -> None:
    monkeypatch.setattr(torch_quantized, "product", product)
    assert fault_of_kernel(torch.device("cpu"), torch.float16) == fault


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "eesd.runtime.engines.torch_kernel", raising=False)
    assert fault_of_kernel(torch.device("cpu"), torch.float16) == "Triton is not installed"
