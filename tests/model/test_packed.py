"""Tests of quantized checkpoints in GPTQ, AWQ and other formats. Either the levels are kept, or the
checkpoint is refused and the error gives the reason."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, load, numpy_helper
from safetensors.torch import load_file, save_file
from support.command import assert_refused, export_engine, run
from support.engine_dirs import assert_weights_match_manifest
from support.tiny_checkpoints import Family, build, edit_json
from support.without_operators import float32_activations, needs_operators

import eesd
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.common.quantization import parts_of
from eesd.common.weights import SCALES, ZEROS
from eesd.export.build import main as build_main
from eesd.export.cli import main as export_main
from eesd.export.make import Choices, make_engines
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import load_decoder

PROMPT = [1, 17, 5, 40, 3, 88, 61]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Stored:
    """A weight in a publisher's format.

    Attributes:
        tensors: The tensors of the weight by the suffixes of their names.
        values: The dequantized weight (float32) of shape [out, in].
        levels: The levels of the weight [in, out]. They are signed if no zero points are stored.
            For floating-point formats, they are the bit patterns.
    """

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor
    levels: NDArray[Any]


Store = Callable[[dict[str, Any], np.random.Generator, int, int], Stored]
"""Makes a random weight [out, in] for a ``quantization_config``."""


@dataclass(frozen=True)
class Scheme:
    """A storage format of quantized weights, implemented from the formats' definitions.

    Attributes:
        config: The ``quantization_config``.
        store: Makes a weight.
        kept: Element type of the levels in an export, or None if the weights are dequantized.
        file: File with the config, if it is not ``config.json``.
    """

    config: dict[str, Any]
    store: Store
    kept: str | None = None
    file: str | None = None


def words(values: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Pack values [rows, columns] into int32 words. Each word contains several columns, and the
    first column is in the lowest bits."""
    per = 32 // bits
    parts = values.reshape(len(values), -1, per) << (bits * np.arange(per))
    return torch.from_numpy(parts.sum(-1).astype(np.uint32).view(np.int32))


def integers(
    random: np.random.Generator,
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    symmetric: bool,
    ordered: bool,
) -> tuple[Stored, NDArray[np.int64], NDArray[np.int64], torch.Tensor, NDArray[np.int64]]:
    """Returns a random integer weight that has no tensors yet, its unsigned levels, its zero points
    and scales (both [groups, out]), and the group of each input."""
    middle = 1 << (bits - 1)
    most = 1 << bits
    group = inputs if group == -1 else group
    levels = random.integers(0, most, (inputs, outputs))
    zeros = random.integers(1, most, (inputs // group, outputs))
    if symmetric:
        zeros[:] = middle
    scales = torch.from_numpy(random.uniform(0.2, 1, zeros.shape) * 0.2 / middle).half()
    index = np.arange(inputs) // group
    if not ordered:
        random.shuffle(index)
    centred = levels - zeros[index]
    values = (
        (torch.from_numpy(centred).float() * scales.float()[torch.from_numpy(index)])
        .t()
        .contiguous()
    )
    return Stored({}, values, centred if symmetric else levels), levels, zeros, scales, index


def gptq(minus: int, ordered: bool = True) -> Store:
    """Stores weights as GPTQ does. ``minus`` is subtracted from the stored zero points."""

    def store(
        config: dict[str, Any], random: np.random.Generator, outputs: int, inputs: int
    ) -> Stored:
        bits = config["bits"]
        symmetric = config["sym"]
        found = integers(random, outputs, inputs, bits, config["group_size"], symmetric, ordered)
        stored, levels, zeros, scales, index = found
        tensors = {
            "qweight": words(levels.T, bits).T.contiguous(),
            "qzeros": words(zeros - minus, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(index).int(),
        }
        return replace(stored, tensors=tensors)

    return store


def awq(config: dict[str, Any], random: np.random.Generator, outputs: int, inputs: int) -> Stored:
    stored, levels, zeros, scales, _ = integers(
        random, outputs, inputs, 4, config["group_size"], False, True
    )
    order = np.arange(outputs).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
    return replace(
        stored,
        tensors={
            "qweight": words(levels[:, order], 4),
            "qzeros": words(zeros[:, order], 4),
            "scales": scales,
        },
    )


def compressed_integers(
    config: dict[str, Any], random: np.random.Generator, outputs: int, inputs: int
) -> Stored:
    weights = config["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    symmetric = weights["symmetric"]
    group = weights.get("group_size") or -1
    ordered = weights.get("actorder") != "group"
    stored, levels, zeros, scales, index = integers(
        random, outputs, inputs, bits, group, symmetric, ordered
    )
    tensors = {"weight_scale": scales.t().contiguous()}
    if config["format"] == "pack-quantized":
        tensors |= {
            "weight_packed": words(levels.T, bits),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        tensors |= {} if ordered else {"weight_g_idx": torch.from_numpy(index).int()}
        tensors |= {} if symmetric else {"weight_zero_point": words(zeros, bits).t().contiguous()}
        return replace(stored, tensors=tensors)
    tensors["weight"] = torch.from_numpy((levels.T - 128).astype(np.int8))
    tensors |= (
        {}
        if symmetric
        else {"weight_zero_point": torch.from_numpy((zeros.T - 128).astype(np.int8))}
    )
    return replace(stored, tensors=tensors | {"input_scale": torch.ones(1)})


def floats(
    rows: int | None,
    columns: int | None,
    name: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
) -> Store:
    """Stores weights in FP8. Each block of ``rows`` outputs and ``columns`` inputs has a scale
    (None means all of them). The scales are in a tensor of this name, type and shape."""

    def store(_: dict[str, Any], random: np.random.Generator, outputs: int, inputs: int) -> Stored:
        bits = random.integers(0, 127, (outputs, inputs)).astype(np.uint8) | (
            random.integers(0, 2, (outputs, inputs)) << 7
        ).astype(np.uint8)
        high = rows or outputs
        wide = columns or inputs
        scales = torch.from_numpy(
            random.uniform(1, 2, (-(-outputs // high), -(-inputs // wide))) * 2e-4
        ).float()
        scales = (scales.log2().round().exp2() if dtype == torch.float8_e8m0fnu else scales).to(
            dtype
        )
        whole = scales.float().numpy().repeat(high, 0)[:outputs].repeat(wide, 1)[:, :inputs]
        values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
        stored = scales if shape is None else scales.reshape(shape)
        tensors = {
            "weight": torch.from_numpy(bits).view(torch.float8_e4m3fn),
            name: stored,
            "input_scale": torch.ones(1),
        }
        return Stored(tensors, torch.from_numpy(values), bits.T)

    return store


def nvfp4(divided: bool) -> Store:
    """Stores weights in NVFP4. All scales have one divisor, as in compressed-tensors, or one
    factor, as in ModelOpt."""

    def store(_: dict[str, Any], random: np.random.Generator, outputs: int, inputs: int) -> Stored:
        codes = random.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        scales = random.uniform(100, 400, (outputs, inputs // 16)).astype(ml_dtypes.float8_e4m3fn)
        factor = np.float32(random.uniform(1, 2) * 1e-4)
        factor = 1 / factor if divided else factor
        wide = scales.astype(np.float32) / factor if divided else scales.astype(np.float32) * factor
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * wide.repeat(16, 1)
        packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        names = (
            ("weight_packed", "weight_global_scale") if divided else ("weight", "weight_scale_2")
        )
        of_all = torch.tensor([factor]) if divided else torch.tensor(factor)
        tensors = {
            names[0]: packed,
            names[1]: of_all,
            "weight_scale": torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn),
        }
        return Stored(tensors, torch.from_numpy(values), codes.T)

    return store


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """Returns a ``quantization_config`` of compressed-tensors, as llm-compressor writes it."""
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {"dynamic": False, "observer": "minmax"} | weights,
    }
    common = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return common | {
        "format": layout,
        "config_groups": {"group_0": group},
        "global_compression_ratio": 1.5,
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [48, 64],
}
MODELOPT = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head"],
}
FP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
}
SCHEMES = {
    "gptq": Scheme(GPTQ, gptq(1), "int4"),
    "gptq-asymmetric": Scheme(GPTQ | {"sym": False, "checkpoint_format": "gptq"}, gptq(1), "uint4"),
    "gptq-v2": Scheme(
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "group_size": 64}, gptq(0), "uint4"
    ),
    "gptq-v2-called-gptq": Scheme(GPTQ | {"checkpoint_format": "gptq"}, gptq(0), "int4"),
    "gptq-8-bits": Scheme(GPTQ | {"bits": 8, "group_size": -1}, gptq(1), "int8"),
    "gptq-8-bits-asymmetric": Scheme(GPTQ | {"bits": 8, "sym": False}, gptq(1)),
    "gptq-act-order": Scheme(GPTQ | {"desc_act": True, "sym": False}, gptq(1, ordered=False)),
    "gptq-groups-of-16": Scheme(GPTQ | {"group_size": 16}, gptq(1)),
    "awq": Scheme(AWQ, awq, "uint4"),
    "awq-64": Scheme(AWQ | {"group_size": 64, "version": "GEMM"}, awq, "uint4"),
    "ct-int4": Scheme(compressed("pack-quantized", **INT4), compressed_integers, "int4"),
    "ct-int4-asymmetric": Scheme(
        compressed("pack-quantized", **INT4 | {"symmetric": False}), compressed_integers, "uint4"
    ),
    "ct-int4-channel": Scheme(
        compressed("pack-quantized", **INT4 | {"strategy": "channel", "group_size": None}),
        compressed_integers,
        "int4",
    ),
    "ct-int4-act-order": Scheme(
        compressed("pack-quantized", **INT4 | {"actorder": "group"}), compressed_integers
    ),
    "ct-int8-groups": Scheme(
        compressed("pack-quantized", **INT4 | {"num_bits": 8}), compressed_integers, "int8"
    ),
    "ct-int8": Scheme(compressed("int-quantized", **INT8), compressed_integers, "int8"),
    "ct-int8-asymmetric": Scheme(
        compressed("int-quantized", **INT8 | {"symmetric": False}), compressed_integers
    ),
    "ct-fp8-tensor": Scheme(
        compressed("naive-quantized", **E4M3, strategy="tensor"),
        floats(None, None, shape=(1,)),
        "float8e4m3fn",
    ),
    "ct-fp8-channel": Scheme(
        compressed("float-quantized", **E4M3, strategy="channel"),
        floats(1, None, dtype=torch.bfloat16),
        "float8e4m3fn",
    ),
    "ct-fp8-blocks": Scheme(
        compressed("float-quantized", **E4M3, strategy="block", block_structure=[16, 32]),
        floats(16, 32),
        "float8e4m3fn",
    ),
    "ct-nvfp4": Scheme(compressed("nvfp4-pack-quantized", **FP4), nvfp4(divided=True)),
    "fp8-blocks": Scheme(FP8_BLOCKS, floats(48, 64, "weight_scale_inv"), "float8e4m3fn"),
    "fp8-blocks-ue8m0": Scheme(
        FP8_BLOCKS | {"scale_fmt": "ue8m0"},
        floats(48, 64, "weight_scale_inv", torch.float8_e8m0fnu),
        "float8e4m3fn",
    ),
    "fp8-uneven-blocks": Scheme(
        FP8_BLOCKS | {"weight_block_size": [48, 48]}, floats(48, 48, "weight_scale_inv")
    ),
    "fp8-static": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"},
        floats(None, None, shape=()),
        "float8e4m3fn",
    ),
    "fbgemm": Scheme(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        floats(1, None),
        "float8e4m3fn",
    ),
    "modelopt-fp8": Scheme(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        floats(None, None, shape=()),
        "float8e4m3fn",
    ),
    "modelopt-nvfp4": Scheme({"quant_method": "modelopt"} | MODELOPT, nvfp4(divided=False)),
    "modelopt-nvfp4-file": Scheme(MODELOPT, nvfp4(divided=False), file="hf_quant_config.json"),
}
KEPT = [name for name, scheme in SCHEMES.items() if scheme.kept is not None]

Pair = tuple[Path, Path, dict[str, NDArray[Any]]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Returns a function that gives three results: a checkpoint with packed weights, a checkpoint
    with the same weights unpacked, and the levels [in, out] by name."""
    plain = build(
        Family("plain", "qwen2", {"intermediate_size": 128}), tmp_path_factory.mktemp("plain")
    )

    @cache
    def pair(name: str) -> Pair:
        return pair_of(plain, tmp_path_factory.mktemp(name), SCHEMES[name])

    return pair


def pair_of(plain: Path, parent: Path, scheme: Scheme) -> Pair:
    random = np.random.default_rng(0)
    values = load_file(plain / "model.safetensors")
    packed = dict(values)
    found = {}
    for name in [name for name in values if name.endswith("_proj.weight")]:
        stored = scheme.store(scheme.config, random, *values[name].shape)
        values[name] = stored.values
        found[name] = stored.levels
        del packed[name]
        packed |= {
            f"{name.removesuffix('weight')}{part}": tensor
            for part, tensor in stored.tensors.items()
        }
    packed["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())  # belongs to a KV cache
    paths = [shutil.copytree(plain, parent / kind) for kind in ("packed", "values")]
    for path, tensors in zip(paths, (packed, values), strict=True):
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
            {"format": "pt"},
        )
    if scheme.file is None:
        edit_json(paths[0] / "config.json", quantization_config=scheme.config)
    else:
        (paths[0] / scheme.file).write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": scheme.config})
        )
    return paths[0], paths[1], found


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_those_of_the_definition(pairs: Callable[[str], Pair], name: str) -> None:
    packed, values, _ = pairs(name)
    expected = load_file(values / "model.safetensors")
    tensors = Checkpoint(packed).tensors
    assert tensors.keys() == expected.keys()
    for weight, tensor in expected.items():
        torch.testing.assert_close(as_torch(tensors[weight].read()), tensor, rtol=0, atol=0)
    # eesd-distill loads its teacher in this way.
    for weight, parameter in load_decoder(Checkpoint(packed)).named_parameters():
        assert torch.equal(parameter, expected[weight])


@pytest.mark.parametrize("name", SCHEMES)
def test_levels_are_stored_as_they_are_or_dequantized(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    """The LM head and the exit head keep their element type."""
    packed, values, levels = pairs(name)
    directory = export_engine(packed, tmp_path / "plans", "--no-check")
    manifest = load_manifest(directory)
    kind = SCHEMES[name].kept
    found = {t.name: t for t in load(directory / "verify.onnx").graph.initializer}
    assert manifest.quantization.head is None and (manifest.quantization.layers is None) == (
        kind is None
    )
    assert_weights_match_manifest(directory)
    stored = {
        weight: parts_of(weight) for weight in found if set(parts_of(weight)) <= levels.keys()
    }
    assert {part for parts in stored.values() for part in parts} == levels.keys()
    exact = load_file(values / "model.safetensors")
    for weight, parts in stored.items():
        if kind is None:
            expected = np.concatenate([exact[part].numpy().T for part in parts], 1)
        else:
            assert (
                found[weight].data_type == TensorProto.DataType.Value(kind.upper())
                and weight + SCALES in found
            )
            expected = np.concatenate([levels[part] for part in parts], 1)
        array = numpy_helper.to_array(found[weight])
        np.testing.assert_array_equal(
            array.view(np.uint8) if array.dtype == ml_dtypes.float8_e4m3fn else array, expected
        )
        assert (weight + ZEROS in found) == (kind == "uint4")


@pytest.mark.parametrize(
    "name", ["gptq", "awq", "gptq-act-order", "gptq-8-bits", "ct-int8", "fp8-blocks"]
)
def test_export_computes_with_the_levels(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    """The logits equal the logits of an export of the dequantized values."""
    packed, values, _ = pairs(name)
    directory = export_engine(packed, tmp_path / "plans", "--check")
    reference = export_engine(values, tmp_path / "reference")
    for backend, activations in {
        ("ort", None),
        ("ort", float32_activations("ort")),
        ("torch", None),
    }:
        quantized, exact = (
            eesd.load(path, backend, speculation=None, threads=1, activations=activations)
            for path in (directory, reference)
        )
        with quantized.session(PROMPT) as one, exact.session(PROMPT) as other:
            found_logits = one.peek()
            expected_logits = other.peek()
        # By default, ONNX Runtime rounds activations to int8.
        rounds = backend == "ort" and activations is None
        tolerance = 0.05 * np.abs(expected_logits).max() if rounds else 1e-4
        np.testing.assert_allclose(found_logits, expected_logits, rtol=0, atol=tolerance)


@needs_operators()
@pytest.mark.parametrize("name", ["awq", "ct-int8", "fp8-blocks", "nvfp4"])
def test_levels_are_packed_straight_from_the_checkpoint(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    """The option ``--model`` and the quick check of every export pack the levels in this way. The
    result has the same bytes as a build from ``weights.bin``."""
    quantize = "nvfp4" if name == "nvfp4" else None
    packed, values, _ = pairs("awq" if quantize else name)
    model = values if quantize else packed
    options = ("--dtype", "bfloat16", "--quantize", quantize or "keep")
    plans = export_engine(model, tmp_path / "plans", *options)
    choices = Choices(str(model), 1, dtype="bfloat16", quantize=quantize, packed=True)
    make_engines(choices, tmp_path / "packed", lambda _: None, lambda _: None)
    [found], [expected] = (path.glob("cpu-*/weights.bin") for path in (tmp_path / "packed", plans))
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("name", ["gptq", "awq", "ct-fp8-channel", "fp8-blocks"])
def test_plans_are_built_of_levels_without_zero_points(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("tensorrt_rtx")
    options = ("--dtype", "float16", "--max-seq-len", 32, "--max-tree-nodes", 8, "--no-check")
    directory = export_engine(pairs(name)[0], tmp_path / "plans", *options)
    result = run(build_main, directory)
    if SCHEMES[name].kept == "uint4":
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
        ("gptq", {"quant_method": "bitsandbytes"}, ("'bitsandbytes'", "gptq, awq")),
        ("gptq", {"quant_method": ["gptq"]}, ("method ['gptq']",)),
        ("gptq", {"bits": 3}, ("3 bits", "gptq")),
        ("gptq", {"bits": 4.0}, ("bits is 4.0",)),
        ("awq", {"bits": 8}, ("8 bits", "awq")),
        ("gptq", {"group_size": "many"}, ("group_size 'many'",)),
        ("gptq", {"group_size": 64}, ("quantization_config",)),
        ("gptq", {"checkpoint_format": "marlin"}, ("'marlin'", "gptq_v2")),
        ("gptq", {"pack_dtype": "int16"}, ("pack_dtype",)),
        ("gptq", {"dynamic": {"-:.*": {}, "+:.*down.*": {"bits": 8}}}, ("dynamic",)),
        ("awq", {"version": "gemv"}, ("'gemv'", "supported is gemm")),
        ("awq", {"backend": "llm-awq"}, ("'llm-awq'", "supported is gemm")),
        ("awq", {"zero_point": False}, ("zero_point",)),
        ("ct-int4", {"format": "marlin-24"}, ("'marlin-24'", "pack-quantized (int 4)")),
        ("ct-int4", {"config_groups": {}}, ("different ways",)),
        (
            "ct-int4",
            {"config_groups": {"a": {"weights": INT4}, "b": {"weights": INT4 | {"num_bits": 8}}}},
            ("different ways",),
        ),
        ("ct-int4", {"config_groups": {"a": {"weights": None}}}, ("without quantized weights",)),
        (
            "ct-int4",
            {"config_groups": {"a": {"weights": INT4 | {"num_bits": 3}}}},
            ("3 bits", "supported are"),
        ),
        (
            "ct-int4",
            {"config_groups": {"a": {"weights": INT4 | {"dynamic": True}}}},
            ("supported are",),
        ),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparsity_config",)),
        (
            "ct-int4",
            {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            ("transform_config",),
        ),
        (
            "ct-int4",
            {"config_groups": {"a": {"weights": INT4 | {"group_size": 64}}}},
            ("_proj", "quantization_config"),
        ),
        (
            "ct-nvfp4",
            {"config_groups": {"a": {"weights": FP4 | {"group_size": 32}}}},
            ("group_size 32",),
        ),
        ("fp8-blocks", {"weight_block_size": [128]}, ("weight_block_size", "two sizes")),
        ("fp8-blocks", {"weight_block_size": [16, 64]}, ("_proj", "quantization_config")),
        ("fp8-blocks", {"fmt": "e5m2"}, ("fmt 'e5m2'", "e4m3")),
        ("fp8-blocks", {"expert_dtype": "fp4"}, ("expert_dtype",)),
        ("modelopt-fp8", {"quant_algo": "W4A16_AWQ"}, ("'W4A16_AWQ'", "NVFP4")),
        ("modelopt-fp8", {"quant_algo": "MIXED_PRECISION"}, ("'MIXED_PRECISION'",)),
    ],
)
def test_other_layouts_are_refused(
    pairs: Callable[[str], Pair],
    tmp_path: Path,
    name: str,
    fields: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    model = copy_of(pairs, tmp_path, name)
    edit_json(model / "config.json", quantization_config=SCHEMES[name].config | fields)
    result = run(
        export_main,
        "--model",
        model,
        "--exit-layer",
        1,
        "--dtype",
        "float32",
        "-o",
        tmp_path / "plans",
    )
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
        ({"g_idx": torch.arange(64, dtype=torch.int32)}, ("q_proj", "quantization_config")),
        ({"pre_quant_scale": torch.ones(64)}, ("pre_quant_scale", "not supported")),
        ({"scales": None}, ("q_proj.scales", "incomplete")),
        ({"scales": torch.ones(1, 64).half()}, ("q_proj", "quantization_config")),
        ({"qweight": torch.zeros(8, 64)}, ("q_proj", "quantization_config")),
        ({"qweight": torch.zeros(0, dtype=torch.int32)}, ("q_proj", "quantization_config")),
        ({"qzeros": torch.zeros(2, 8, dtype=torch.int32)}, ("q_proj", '"sym"')),
    ],
)
def test_damaged_weights_are_refused(
    pairs: Callable[[str], Pair],
    tmp_path: Path,
    changed: dict[str, torch.Tensor | None],
    words: tuple[str, ...],
) -> None:
    model = copy_of(pairs, tmp_path)
    edit_tensors(model, **changed)
    result = run(
        export_main,
        "--model",
        model,
        "--exit-layer",
        1,
        "--dtype",
        "float32",
        "-o",
        tmp_path / "plans",
    )
    assert_refused(result, *words)
    assert not (tmp_path / "plans").exists()


def test_a_mixture_and_groups_of_any_inputs_are_dequantized(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    """One model has a layer without levels, because some publishers do not quantize the first
    layer. Another model uses ``act-order``, which its config does not mention."""
    plain = {
        "qweight": None,
        "qzeros": None,
        "scales": None,
        "g_idx": None,
        "weight": torch.ones(64, 64),
    }
    model = copy_of(pairs, tmp_path / "order")
    mixed = copy_of(pairs, tmp_path / "mixed")
    edit_tensors(mixed, **plain)
    edit_json(
        mixed / "config.json",
        quantization_config=GPTQ | {"dynamic": {"-:.*layers.0.self_attn.q_proj": {}}},
    )
    index = torch.arange(64, dtype=torch.int32).flip(0) // 32
    edit_tensors(model, g_idx=index)
    for one in (model, mixed):
        checkpoint = Checkpoint(one)
        assert checkpoint.quantization is None
        result = run(
            export_main,
            "--model",
            one,
            "--exit-layer",
            1,
            "--no-check",
            "-o",
            tmp_path / f"{one.parent.name}-plans",
        )
        assert not result.exit_code and "dequantized" in result.stderr
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = load_file(pairs("gptq")[1] / "model.safetensors")[name]
    packed = load_file(model / "model.safetensors")
    scales = packed[name.replace("weight", "scales")].float().t()
    centred = whole / scales.repeat_interleave(32, 1)
    torch.testing.assert_close(
        as_torch(Checkpoint(model).tensors[name].read()), centred * scales[:, index.long()]
    )
    assert (Checkpoint(mixed).tensors[name].read() == np.ones((64, 64))).all()


def test_symmetric_zeros_of_both_formats_are_told_apart(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    """If zero points of 8 were read with "sym": false, every weight would be off by one scale."""
    model = copy_of(pairs, tmp_path, "gptq-v2-called-gptq")
    edit_json(model / "config.json", quantization_config=GPTQ | {"sym": False})
    with pytest.raises(EESDError, match="set it to true"):
        Checkpoint(model).tensors["model.layers.0.self_attn.q_proj.weight"].read()


def test_fused_layers_and_turned_rows_keep_their_levels(tmp_path: Path) -> None:
    """Phi-3 stores q, k and v as one tensor, and rotates a part of each head."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
    family = Family(
        "phi3", "phi3", {"intermediate_size": 128, "rope_parameters": rope, "pad_token_id": None}
    )
    plain = build(family, tmp_path / "plain")
    for name in ("ct-int4-asymmetric", "ct-fp8-channel", "ct-nvfp4"):
        packed, values, _ = pair_of(plain, tmp_path / name, SCHEMES[name])
        checkpoint = Checkpoint(packed)
        exact = Checkpoint(values)
        for weight, tensor in exact.tensors.items():
            np.testing.assert_array_equal(checkpoint.tensors[weight].read(), tensor.read(), weight)
        assert (checkpoint.quantization is None) == (SCHEMES[name].kept is None)
        directory = export_engine(packed, tmp_path / f"{name}-plans", "--check")
        reference = export_engine(values, tmp_path / f"{name}-reference", "--no-check")
        logits = []
        for path in (directory, reference):
            with eesd.load(path, "torch", speculation=None, threads=1).session(PROMPT) as session:
                logits.append(session.peek().copy())
        np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-4)


def test_zero_points_beyond_the_range_are_refused(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    """GPTQ stores the zero point minus one, so 15 would mean 16."""
    model = copy_of(pairs, tmp_path, "gptq-asymmetric")
    edit_tensors(model, qzeros=torch.full((2, 8), -1, dtype=torch.int32))
    with pytest.raises(EESDError, match="does not fit 4 bits"):
        Checkpoint(model).tensors["model.layers.0.self_attn.q_proj.weight"].read()


def test_biases_that_the_architecture_lacks_must_be_zero(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    model = copy_of(pairs, tmp_path)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.bias"
    save_file(tensors | {name: torch.zeros(128)}, model / "model.safetensors", {"format": "pt"})
    assert not Checkpoint(model).config.notices
    save_file(tensors | {name: torch.ones(128)}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(EESDError, match=r"up_proj\.bias"):
        Checkpoint(model)


def test_quantizing_again_is_refused_and_unknown_fields_are_reported(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    model = copy_of(pairs, tmp_path)
    edit_json(
        model / "config.json", quantization_config=GPTQ | {"surprise": 1, "damp_percent": 0.1}
    )
    assert [
        text
        for text in Checkpoint(model).config.notices
        if "quantization_config.surprise" in text and "damp" not in text
    ]
    options = (
        "--exit-layer",
        1,
        "--dtype",
        "float32",
        "--quantize",
        "int4",
        "-o",
        tmp_path / "plans",
    )
    assert_refused(
        run(export_main, "--model", model, *options), "quantized already", "--quantize none"
    )
    directory = export_engine(model, tmp_path / "plain", "--quantize", "none", "--no-check")
    assert load_manifest(directory).quantization.layers is None
