"""Checkpoints that GPTQ and AWQ quantized: their levels are taken as they are, or the checkpoint is refused by name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, load, numpy_helper
from safetensors.torch import load_file, save_file
from support.command import assert_refused, export_engine, run
from support.engine_dirs import assert_weights_match_manifest
from support.tiny_checkpoints import Family, build
from support.without_operators import float32_activations

import eesd
from eesd.common.errors import EESDError
from eesd.common.manifest_reader import load_manifest
from eesd.common.weights import SCALES, ZEROS, parts_of
from eesd.export.build import main as build_main
from eesd.export.cli import main as export_main
from eesd.model.checkpoint import Checkpoint

PROMPT = [1, 17, 5, 40, 3, 88, 61]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """A way to store quantized weights, written from the formats' definitions."""

    config: dict[str, Any]

    @property
    def bits(self) -> int:
        return int(self.config["bits"])

    @property
    def symmetric(self) -> bool:
        return bool(self.config.get("sym", False))

    def tensors(self, levels: NDArray[np.int64], zeros: NDArray[np.int64], scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """The stored tensors of levels [in, out], zero points and scales [groups, out]."""
        if self.config["quant_method"] == "awq":
            order = np.arange(levels.shape[1]).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
            return {
                "qweight": words(levels[:, order], 4),
                "qzeros": words(zeros[:, order], 4),
                "scales": scales,
            }
        minus = 0 if self.config.get("checkpoint_format") == "gptq_v2" else 1
        group = levels.shape[0] // zeros.shape[0]
        return {
            "qweight": words(levels.T, self.bits).T.contiguous(),
            "qzeros": words(zeros - minus, self.bits),
            "scales": scales,
            "g_idx": torch.arange(levels.shape[0], dtype=torch.int32) // group,
        }


def words(values: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Values [rows, columns] as int32 words of several columns, the first in the lowest bits."""
    per = 32 // bits
    parts = values.reshape(len(values), -1, per) << (bits * np.arange(per))
    return torch.from_numpy(parts.sum(-1).astype(np.uint32).view(np.int32))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
SCHEMES = {
    "gptq": Scheme(GPTQ),
    "gptq-asymmetric": Scheme(GPTQ | {"sym": False, "checkpoint_format": "gptq"}),
    "gptq-v2": Scheme(GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "group_size": 64}),
    "gptq-8-bits": Scheme(GPTQ | {"bits": 8, "group_size": -1}),
    "awq": Scheme(AWQ),
    "awq-64": Scheme(AWQ | {"group_size": 64, "version": "GEMM"}),
}

Pair = tuple[Path, Path, dict[str, NDArray[np.int64]]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function that returns a checkpoint with packed weights, one with their values, and the levels [in, out] by name."""
    plain = build(Family("plain", "qwen2", {"intermediate_size": 128}), tmp_path_factory.mktemp("plain"))
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = _pair(plain, tmp_path_factory.mktemp(name), SCHEMES[name])
        return made[name]

    return pair


def _pair(plain: Path, parent: Path, scheme: Scheme) -> Pair:
    random = np.random.default_rng(0)
    values = load_file(plain / "model.safetensors")
    packed, found = dict(values), {}
    middle, most = 1 << (scheme.bits - 1), 1 << scheme.bits
    for name in [name for name in values if name.endswith("_proj.weight")]:
        outputs, inputs = values[name].shape
        group = inputs if scheme.config["group_size"] == -1 else scheme.config["group_size"]
        levels = random.integers(0, most, (inputs, outputs))
        zeros = random.integers(1, most, (inputs // group, outputs))
        if scheme.symmetric:
            zeros[:] = middle
        scales = torch.from_numpy(random.uniform(0.2, 1, zeros.shape) * 0.2 / middle).half()
        centred = levels - np.repeat(zeros, group, 0)
        weight = torch.from_numpy(centred).float() * scales.float().repeat_interleave(group, 0)
        values[name] = weight.t().contiguous()
        del packed[name]
        packed |= {f"{name.removesuffix('weight')}{part}": t for part, t in scheme.tensors(levels, zeros, scales).items()}
        found[name] = centred if scheme.symmetric else levels
    paths = [shutil.copytree(plain, parent / kind) for kind in ("packed", "values")]
    for path, tensors in zip(paths, (packed, values), strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    edit_config(paths[0], quantization_config=scheme.config)
    return paths[0], paths[1], found


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_those_of_the_definition(pairs: Callable[[str], Pair], name: str) -> None:
    packed, values, _ = pairs(name)
    expected = load_file(values / "model.safetensors")
    tensors = Checkpoint(packed).tensors
    assert tensors.keys() == expected.keys()
    for weight, tensor in expected.items():
        torch.testing.assert_close(tensors[weight].read(), tensor, rtol=0, atol=0)
    for weight, parameter in Checkpoint(packed).decoder().named_parameters():  # the teacher of eesd-distill
        assert torch.equal(parameter, expected[weight])


@pytest.mark.parametrize("name", SCHEMES)
def test_export_keeps_the_levels_and_computes_with_them(pairs: Callable[[str], Pair], tmp_path: Path, name: str) -> None:
    """The same logits as an export of the values. LM head and exit head keep the element type."""
    packed, values, levels = pairs(name)
    directory = export_engine(packed, tmp_path / "plans", "--check")
    reference = export_engine(values, tmp_path / "reference")
    manifest = load_manifest(directory)
    assert manifest.quantization.layers is not None and manifest.quantization.head is None
    found = {t.name: t for t in load(directory / "verify.onnx").graph.initializer}
    kind = ("" if SCHEMES[name].symmetric else "U") + f"INT{SCHEMES[name].bits}"
    quantized_weights = {
        weight: parts_of(weight) for weight in found if weight + SCALES in found and weight.startswith("model.layers.")
    }
    for weight, parts in quantized_weights.items():
        assert found[weight].data_type == TensorProto.DataType.Value(kind)
        expected = np.concatenate([levels[part] for part in parts], 1)
        np.testing.assert_array_equal(numpy_helper.to_array(found[weight]).astype(np.int64), expected)
        assert (weight + ZEROS in found) != SCHEMES[name].symmetric
    assert {part for parts in quantized_weights.values() for part in parts} == levels.keys()
    assert_weights_match_manifest(directory)
    for backend, activations in {("ort", None), ("ort", float32_activations("ort")), ("torch", None)}:
        quantized, exact = (
            eesd.load(path, backend, speculation=None, threads=1, activations=activations) for path in (directory, reference)
        )
        with quantized.session(PROMPT) as one, exact.session(PROMPT) as other:
            found_logits, expected_logits = one.peek(), other.peek()
        # By default ort rounds activations to int8.
        rounds = backend == "ort" and activations is None
        tolerance = 0.05 * np.abs(expected_logits).max() if rounds else 1e-4
        np.testing.assert_allclose(found_logits, expected_logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_plans_are_built_of_levels_without_zero_points(pairs: Callable[[str], Pair], tmp_path: Path, name: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    options = ("--dtype", "float16", "--max-seq-len", 32, "--max-tree-nodes", 8, "--no-check")
    directory = export_engine(pairs(name)[0], tmp_path / "plans", *options)
    result = run(build_main, directory)
    if not SCHEMES[name].symmetric:
        assert_refused(result, "zero points", "quantized without")
        return
    assert not result.exit_code and "single kernels" not in result.stderr
    manifest = load_manifest(directory)
    assert manifest.plans["verify.onnx"].fused_attentions == manifest.geometry.num_layers


def copy_of(pairs: Callable[[str], Pair], tmp_path: Path, name: str = "gptq") -> Path:
    return shutil.copytree(pairs(name)[0], tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, ("'bitsandbytes'", "gptq and awq")),
        ("gptq", {"bits": 3}, ("3 bits", "gptq")),
        ("gptq", {"bits": 4.0}, ("bits is 4.0",)),
        ("awq", {"bits": 8}, ("8 bits", "awq")),
        ("gptq", {"group_size": 48}, ("group_size 48", "multiples of 32")),
        ("gptq", {"group_size": 64}, ("quantization_config",)),
        ("gptq-8-bits", {"sym": False}, ("8 bits", "sym is false")),
        ("gptq", {"checkpoint_format": "marlin"}, ("'marlin'", "gptq_v2")),
        ("gptq", {"dynamic": {"-:.*": {}}}, ("dynamic",)),
        ("gptq", {"pack_dtype": "int16"}, ("pack_dtype",)),
        ("awq", {"version": "gemv"}, ("'gemv'", "gemm")),
        ("awq", {"zero_point": False}, ("zero_point",)),
    ],
)
def test_other_layouts_are_refused(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = copy_of(pairs, tmp_path, name)
    edit_config(model, quantization_config=SCHEMES[name].config | fields)
    result = run(export_main, "--model", model, "--exit-layer", 1, "--dtype", "float32", "-o", tmp_path / "plans")
    assert_refused(result, *words)


def edit_tensors(model: Path, **changed: torch.Tensor | None) -> None:
    """Replace or remove tensors of the first layer's q_proj."""
    tensors = load_file(model / "model.safetensors")
    for part, tensor in changed.items():
        name = f"model.layers.0.self_attn.q_proj.{part}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"g_idx": torch.arange(64, dtype=torch.int32).flip(0) // 32}, ("consecutive", "desc_act")),
        ({"scales": None}, ("q_proj.scales", "incomplete")),
        ({"scales": torch.ones(1, 64).half()}, ("q_proj", "quantization_config")),
        ({"qweight": torch.zeros(8, 64)}, ("q_proj", "quantization_config")),
        ({"qweight": torch.zeros(0, dtype=torch.int32)}, ("q_proj.qweight",)),
        ({"qzeros": torch.zeros(2, 8, dtype=torch.int32)}, ("q_proj", '"sym"')),
        ({"qweight": None, "qzeros": None, "scales": None, "g_idx": None, "weight": torch.ones(64, 64)}, ("mixture",)),
    ],
)
def test_damaged_and_mixed_weights_are_refused(
    pairs: Callable[[str], Pair], tmp_path: Path, changed: dict[str, torch.Tensor | None], words: tuple[str, ...]
) -> None:
    model = copy_of(pairs, tmp_path)
    edit_tensors(model, **changed)
    result = run(export_main, "--model", model, "--exit-layer", 1, "--dtype", "float32", "-o", tmp_path / "plans")
    assert_refused(result, *words)
    assert not (tmp_path / "plans").exists()


def test_zero_points_beyond_the_range_are_refused(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    """GPTQ stores the zero point minus one, so 15 would mean 16."""
    model = copy_of(pairs, tmp_path, "gptq-asymmetric")
    edit_tensors(model, qzeros=torch.full((2, 8), -1, dtype=torch.int32))
    with pytest.raises(EESDError, match="does not fit 4 bits"):
        Checkpoint(model).tensors["model.layers.0.self_attn.q_proj.weight"].read()


def test_biases_that_the_architecture_lacks_must_be_zero(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    model = copy_of(pairs, tmp_path)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.bias"
    save_file(tensors | {name: torch.zeros(128)}, model / "model.safetensors", {"format": "pt"})
    assert not Checkpoint(model).config.notices
    save_file(tensors | {name: torch.ones(128)}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(EESDError, match=r"up_proj\.bias"):
        Checkpoint(model)


def test_quantizing_again_is_refused_and_unknown_fields_are_reported(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    model = copy_of(pairs, tmp_path)
    edit_config(model, quantization_config=GPTQ | {"surprise": 1, "damp_percent": 0.1})
    assert [text for text in Checkpoint(model).config.notices if "quantization_config.surprise" in text and "damp" not in text]
    options = ("--exit-layer", 1, "--dtype", "float32", "--quantize", "int4", "-o", tmp_path / "plans")
    assert_refused(run(export_main, "--model", model, *options), "quantized already", "--quantize")
