"""Weights that are floating-point numbers of 8 and 4 bits: fp8 and nvfp4."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.command import assert_refused, export_engine, run, slow_but, succeed
from support.engine_dirs import assert_weights_match_manifest, edit_manifest, graph_of
from support.without_operators import needs_operators

import eesd
from eesd.common.manifest import load_manifest
from eesd.common.quantization import FP4, FP8
from eesd.common.weights import FACTOR, SCALES
from eesd.export.build import main as build_main
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.export.widened import reference
from eesd.model.arrays import rounded, to_float32
from eesd.model.quantize import quantize
from eesd.model.quantized import dequantize
from eesd.runtime.cli import main as run_main
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import Call
from eesd.runtime.llm import Speculation

PROMPT = [1, 17, 5, 40, 3, 88, 61]
DRAFTING = Speculation("fixed:k=3", 2, guard=False)
LEVELS = {"fp8": (FP8, ml_dtypes.float8_e4m3fn, 256), "nvfp4": (FP4, ml_dtypes.float4_e2m1fn, 16)}
Export = Callable[[str, str, str], Path]


@pytest.fixture(scope="module")
def exported(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function that returns checked engines of a family. Tests must not change them."""

    @cache
    def directory(family: str, kind: str, dtype: str) -> Path:
        output = tmp_path_factory.mktemp("small") / f"{family}-{kind}"
        return export_engine(
            family_dir(family), output, "--quantize", kind, "--dtype", dtype, "--check"
        )

    return directory


def random_weight(outputs: int, inputs: int) -> NDArray[np.float32]:
    """Outputs of very different sizes, one of them zero."""
    weight = np.random.default_rng(0).standard_normal((outputs, inputs), np.float32)
    weight *= np.logspace(-6, 2, outputs, dtype=np.float32)[:, None]
    weight[5] = 0
    return weight


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_levels_are_the_nearest_ones(kind: str, dtype: str) -> None:
    """As another library decodes them, with the scales that were found."""
    levels, numbers, count = LEVELS[kind]
    stored = rounded(random_weight(37, 96), dtype)
    weight = to_float32(stored)
    found = quantize(stored, levels, dtype)
    bits = np.arange(count, dtype=np.uint8).view(numbers).astype(np.float32)
    grid = np.sort(bits[np.isfinite(bits)])
    scales = found.whole_scales.T.repeat(96 // len(found.scales), 1)[:, :, None]
    nearest = np.abs(grid * scales - weight[:, :, None]).min(2)
    values = dequantize(found, levels).T
    np.testing.assert_allclose(np.abs(values - weight), nearest, rtol=1e-5, atol=1e-12)
    if kind == "nvfp4":  # the end of the range that fits a block better, from all scales there are
        assert found.factor is not None and np.log2(float(found.factor)) % 1 == 0
        blocks = weight.reshape(37, 6, 16)
        every = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(
            np.float32
        ) * float(found.factor)
        best = np.stack(
            [np.square(np.abs(grid * s - blocks[..., None]).min(3)).sum(2) for s in every]
        ).min(0)
        own = np.square(values.reshape(37, 6, 16) - blocks).sum(2)
        assert (
            own.sum() < 1.3 * best.sum() and (own[:, :] <= np.square(blocks).sum(2) + 1e-30).all()
        )


def test_parts_of_a_packed_weight_have_the_same_values_alone() -> None:
    """The export compares graphs with modules whose layers are not packed."""
    weight = np.random.default_rng(0).standard_normal((48, 64), np.float32)
    weight *= np.array([1.0, 0.2, 5.0], np.float32).repeat(16)[:, None]
    whole = dequantize(quantize(weight, FP4, "float16"), FP4)
    parts = [dequantize(quantize(part, FP4, "float16"), FP4) for part in np.split(weight, 3)]
    np.testing.assert_array_equal(whole, np.concatenate(parts, 1))


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    slow_but(
        [
            (f, k, d)
            for f in ("llama-tied", "qwen2", "llama-head-dim")
            for k in LEVELS
            for d in ("float16", "bfloat16")
        ],
        ("llama-tied", "nvfp4", "float16"),
        ("qwen2", "fp8", "bfloat16"),
        ("qwen2", "nvfp4", "bfloat16"),
    ),
)
def test_graphs_are_standard_and_every_backend_decodes_without_a_change(
    exported: Export, family: str, kind: str, dtype: str
) -> None:
    """With and without our operators, greedily and sampled, tokens equal plain decoding; the logits
    are nearly equal."""
    directory = exported(family, kind, dtype)
    assert_weights_match_manifest(directory)
    for graph in load_manifest(directory).graphs:
        onnx.checker.check_model(directory / graph.file, full_check=True)
        model = graph_of(directory, graph.file)
        assert {opset.domain for opset in model.opset_import} == {""}
        stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        levels = {
            name
            for name, of in stored.items()
            if of == onnx.TensorProto.DataType.Value(LEVELS[kind][0].upper())
        }
        assert {
            name for name in levels if name.endswith("_proj.weight")
        } and "lm_head.weight" in levels
        assert all(
            (name + FACTOR in stored) == (kind == "nvfp4") and name + SCALES in stored
            for name in levels
            if "." in name[-7:]
        )
    logits = [of_backend(directory, "torch"), of_backend(directory, "ort")]
    logits.append(of_graphs(directory))
    # Where processors multiply bfloat16 themselves, torch rounds more.
    share = 0.05 if dtype == "float16" else 0.1
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], rtol=0, atol=share * np.abs(logits[0]).max())


def of_backend(directory: Path, backend: str) -> NDArray[np.float32]:
    """The logits behind the prompt. Drafting changes no token."""
    plain, drafting = (
        eesd.load(directory, backend, speculation=one, threads=1) for one in (None, DRAFTING)
    )
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        tokens, wanted = (
            llm.generate(PROMPT, sampling, max_new_tokens=40, ignore_eos=True).tokens
            for llm in (drafting, plain)
        )
        assert tokens == wanted
    with plain.session(PROMPT) as session:
        return session.peek().copy()


def of_graphs(directory: Path) -> NDArray[np.float32]:
    """The same of the graphs as they are on disk, widened to float32."""
    manifest = load_manifest(directory)
    engine = reference(directory, manifest, manifest.verify, 1)
    [kv_cache] = engine.new_kv_caches()
    kv_cache.reserve(len(PROMPT))
    logits: NDArray[np.float32] = engine.forward([Call(kv_cache, PROMPT, range(len(PROMPT)), 0)])[
        0
    ].logits[-1]
    return logits


@needs_operators()
def test_operators_multiply_by_the_values_of_the_graph(exported: Export) -> None:
    """With float32 activations both compute the same products, to what 16 bits round."""
    for kind in LEVELS:
        directory = exported("qwen2", kind, "bfloat16")
        with eesd.load(
            directory, "ort", speculation=None, threads=1, activations="float32"
        ).session(PROMPT) as session:
            own = session.peek().copy()
        np.testing.assert_allclose(own, of_graphs(directory), rtol=0, atol=1e-4 * np.abs(own).max())


def test_small_floats_are_for_engines_of_16_bits(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    options = (
        "--model",
        family_dir("qwen2"),
        "-o",
        tmp_path / "plans",
        "--exit-layer",
        1,
        "--dtype",
        "float32",
    )
    for more in (("--quantize", "fp8"), ("--quantize-draft", "nvfp4"), ("--quantize-head", "fp8")):
        assert_refused(run(export_main, *options, *more), "16 bits", "--dtype float16 or bfloat16")


def test_commands_name_the_types_as_the_options_do(exported: Export) -> None:
    for kind in LEVELS:
        shown = succeed(inspect_main, exported("qwen2", kind, "bfloat16")).stdout
        assert kind in shown and "float" not in shown.replace("bfloat16", "").replace("float32", "")


def test_a_manifest_with_other_small_floats_is_refused(exported: Export, tmp_path: Path) -> None:
    """Minimums, other blocks, or scales of another type than the export writes."""
    for number, (name, value) in enumerate(
        (("minimums", True), ("block", 64), ("scales", "float16"))
    ):
        copy = shutil.copytree(exported("qwen2", "nvfp4", "bfloat16"), tmp_path / str(number))
        edit_manifest(copy, f"quantization/layers/{name}", value)
        assert_refused(run(run_main, "--engine-dir", copy, "--prompt", "a"), "manifest.json")


def test_plans_are_built_for_the_gpus_that_know_the_type(exported: Export, tmp_path: Path) -> None:
    """TensorRT-RTX builds nothing for older ones, and fails if it is not told."""
    pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")
    for kind, oldest, wanted in (("fp8", "8.6", "8.9"), ("nvfp4", "8.9", "12.0")):
        copy = shutil.copytree(exported("qwen2", kind, "bfloat16"), tmp_path / kind)
        assert_refused(
            run(build_main, copy, "--compute-capability", oldest),
            f"no kernels for {kind} weights",
            oldest,
        )
        succeed(build_main, copy)
        plans = load_manifest(copy).plans
        assert len(plans) == 2 and all(
            min(map(float, plan.compute_capabilities)) == float(wanted) for plan in plans.values()
        )
        assert all(plan.fused_attentions for plan in plans.values())
