"""Tests of ``eesd-export --quantize``. Blocks of integers and of small floats (fp8 and nvfp4) are
exact, every backend supports them, and drafting stays lossless."""

import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file, save_file
from support.bundled import EXAMPLE, assert_lossless, prompts
from support.command import assert_refused, export_engine, listing, run, slow_but, succeed
from support.engine_dirs import (
    assert_weights_match_manifest,
    edit_manifest,
    graph_of,
    reference_logits,
    tensor_locations,
    trained_head,
)
from support.lossless_checks import check_drafting
from support.tiny_checkpoints import Family, build
from support.without_operators import needs_operators, without_operators

import eesd
from eesd.common.manifest import load_manifest
from eesd.common.quantization import BITS, BLOCK, FP4, FP8, parts_of
from eesd.common.weights import FACTOR, MINIMUMS, SCALES, ZEROS
from eesd.export import make
from eesd.export.build import main as build_main
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.model.arrays import Array, rounded, to_float32
from eesd.model.quantize import quantize
from eesd.model.quantized import Quantized, dequantize, join_quantized, pack, part_of
from eesd.runtime.cli import main as run_main
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import Call, Engine
from eesd.runtime.llm import Speculation

KINDS = ("int8", "int4")
PROMPT = [1, 17, 5, 40, 3, 88, 61]
OWN = {"weights": "int8", "block": 32, "minimums": True, "scales": "float16"}
"""The quantization of a tensor as a manifest describes it."""
SPECULATIONS = [Speculation("fixed:k=3", guard=False), Speculation("beta-ts", tree=3, guard=False)]
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Returns a function that gives the quantized engines of a family. Tests must not change
    them."""

    @cache
    def directory(family: str, kind: str, *options: object) -> Path:
        output = tmp_path_factory.mktemp("quantized") / f"{family}-{kind}"
        return export_engine(family_dir(family), output, "--quantize", kind, *options)

    return directory


def unpacked(stored: Array, kind: str, shape: tuple[int, int]) -> NDArray[np.int16]:
    """Returns the levels as the ONNX format defines them. The first of two 4-bit values is in the
    low half of the byte."""
    data = stored.tobytes()
    if kind == "int8":
        return np.frombuffer(data, np.int8).reshape(shape).astype(np.int16)
    halves = [half for byte in data for half in (byte & 15, byte >> 4)][: shape[0] * shape[1]]
    return np.array(
        [half - 16 if half > 7 and kind == "int4" else half for half in halves], np.int16
    ).reshape(shape)


def by_definition(quantized: Quantized, kind: str) -> NDArray[np.float32]:
    """Returns the weight [in, out] as the format defines it. Each value is the scale times the
    level, plus the minimum."""
    blocks, outputs = quantized.scales.shape
    levels = unpacked(quantized.levels, kind, (blocks * BLOCK, outputs))
    result = to_float32(levels) * np.repeat(to_float32(quantized.scales), BLOCK, 0)
    if quantized.minimums is not None:
        result += np.repeat(to_float32(quantized.minimums), BLOCK, 0)
    return result


def random_weight(outputs: int, inputs: int, dtype: str = "float32") -> Array:
    """Returns a weight that has blocks of zeros and blocks of one sign. Its magnitudes go down to
    the subnormal numbers of float16."""
    weight = np.random.default_rng(0).standard_normal((outputs, inputs), np.float32)
    weight *= np.logspace(-8, 2, outputs, dtype=np.float32)[:, None]
    weight[5] = 0
    weight[7] = np.abs(weight[7])
    weight[8] = -np.abs(weight[8])
    return rounded(weight, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "int4", "uint4"])
def test_levels_and_scales_mean_what_onnx_defines(kind: str, dtype: str) -> None:
    """The number of outputs is odd."""
    weight = random_weight(37, 7 * BLOCK, dtype)
    quantized = quantize(weight, kind, dtype)
    scales = quantized.scales
    minimums = quantized.minimums
    assert (
        scales.dtype == ("float16" if kind == "uint4" else dtype)
        and scales.shape == (7, 37)
        and (scales >= 0).all()
    )
    assert len(quantized.levels) == 7 * BLOCK * 37 * BITS[kind] // 8 and quantized.zeros is None
    assert (minimums is not None) == (kind == "uint4")
    assert minimums is None or (minimums.dtype, minimums.shape) == (scales.dtype, scales.shape)
    np.testing.assert_array_equal(dequantize(quantized, kind), by_definition(quantized, kind))
    if kind == "int8":
        half = np.repeat(to_float32(scales), BLOCK, 0) * 0.5001
        assert (np.abs(by_definition(quantized, kind) - to_float32(weight).T) <= half).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_searched_levels_are_closer_than_levels_over_the_whole_range(kind: str, dtype: str) -> None:
    """The squared error is much smaller overall, and not much larger in any block. No weight is far
    off."""
    # The rows whose scales float16 rounds coarsely are left out.
    weight = random_weight(64, 8 * BLOCK, dtype)[20:]
    found = by_definition(quantize(weight, kind, dtype), kind).T.reshape(-1, BLOCK)
    blocks = to_float32(weight).reshape(-1, BLOCK)
    low = blocks.min(1, keepdims=True)
    high = blocks.max(1, keepdims=True)
    scale = (high - low) / 15
    minimum = low
    least = 0
    most = 15
    if kind == "int4":
        scale = np.maximum(high, -low) / 7
        minimum = np.zeros_like(low)
        least = -8
        most = 7
    plain = np.clip(np.round((blocks - minimum) / scale), least, most) * scale + minimum
    searched, whole = (np.square((x - blocks) / scale).sum(1) for x in (found, plain))
    assert (searched <= whole * 1.1).all() and float(searched.sum()) < {
        "int4": 0.82,
        "uint4": 0.86,
    }[kind] * float(whole.sum())
    assert (np.abs(found - blocks) <= 0.35 * np.abs(blocks).max(1, keepdims=True)).all()


def test_a_checkpoint_that_was_dequantized_from_q4_1_gets_its_levels_back() -> None:
    """Every weight has the same bits. The weights of this test come from GGUF's quantizer."""
    random = np.random.default_rng(0)
    values = random.normal(
        random.normal(0, 0.3, (64, 1)), np.logspace(-3, 1, 64)[:, None], (64, 8 * BLOCK)
    ).astype(np.float32)
    values[3] = 0
    values[4] = 0.5
    values[5, :BLOCK] = np.linspace(1, 2, BLOCK)
    kind = gguf.GGMLQuantizationType.Q4_1
    weight = gguf.dequantize(gguf.quantize(values, kind), kind)
    np.testing.assert_array_equal(
        dequantize(quantize(weight, "uint4", "float32"), "uint4").T, weight
    )


def test_weights_that_float16_cannot_hold_are_refused(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """int8 has float32 scales, and accepts weights that float16 cannot hold."""
    model = shutil.copytree(family_dir("qwen2"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = 1e5
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    options = ("--model", model, "--exit-layer", 1, "-o", tmp_path / "plans", "--no-check")
    assert_refused(
        run(export_main, *options, "--quantize", "int4"), name, "65504", "--quantize none"
    )
    succeed(export_main, *options, "--quantize", "int8", "--quantize-draft", "int8")


def test_result_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((33, 5 * BLOCK), np.float32)
    whole = quantize(weight, "uint4", "float16")
    for piece in (2 * BLOCK * 33, 7 * BLOCK):
        monkeypatch.setattr("eesd.model.quantize._PIECE", piece)
        for part, expected in zip(quantize(weight, "uint4", "float16"), whole, strict=True):
            np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "llama-bias"])
def test_graphs_are_standard_and_quantize_only_linear_weights(
    exported: Export, family: str, kind: str
) -> None:
    """Both graphs share the quantized weights. A tied LM head gets a quantized copy."""
    directory = exported(family, kind, "--quantize-draft", kind)
    manifest = load_manifest(directory)
    stored: dict[str, tuple[int, int]] = {}
    for graph in manifest.graphs:
        onnx.checker.check_model(directory / graph.file, full_check=True)
        model = graph_of(directory, graph.file)
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
        types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        quantized = {name for name in types if name + SCALES in types}
        levels = {"int8": TensorProto.INT8, "int4": TensorProto.UINT4}[kind]
        assert {types[name] for name in quantized} == {levels}
        scales = TensorProto.FLOAT16 if kind == "int4" else TensorProto.FLOAT
        assert {types[name + SCALES] for name in quantized} == {scales} and not any(
            name + ZEROS in types for name in quantized
        )
        assert {types.get(name + MINIMUMS) for name in quantized} == {
            scales if kind == "int4" else None
        }
        dequantized = [
            node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"
        ]
        products = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
        assert set(dequantized) == quantized and len(products) == len(dequantized)
        assert not products & types.keys() and "lm_head.weight" in quantized
        assert not any(
            word in name for name in quantized for word in ("norm", "embed", "bias", "cos", "sin")
        )
        for name, location in tensor_locations(model).items():
            assert stored.setdefault(name, location) == location


@pytest.mark.parametrize(
    ("kind", "options"), [("int8", ("--quantize-draft", "int8")), ("int4", ())]
)
def test_onnx_runtime_widens_weights_when_it_loads_them(
    exported: Export, tmp_path: Path, kind: str, options: tuple[str, ...]
) -> None:
    """There are four float32 products for each layer, one for the keys and values of the exit head,
    and one for the LM head."""
    directory = exported("qwen2", kind, *options)
    made: list[ort.SessionOptions] = []
    original = ort.SessionOptions

    def recorded() -> ort.SessionOptions:
        made.append(original())
        made[-1].optimized_model_filepath = str(tmp_path / "optimized.onnx")
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, without_operators():
        patch.setattr(ort, "SessionOptions", recorded)
        eesd.load(directory, "ort", speculation=None)
    kinds = [
        node.op_type
        for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    ]
    products = 4 * load_manifest(directory).geometry.num_layers + 2
    found = (kinds.count("MatMulNBits"), kinds.count("MatMul"), kinds.count("DequantizeLinear"))
    assert found == (0, products, 0)


@pytest.mark.parametrize("kind", slow_but(list(KINDS), "int4"))
def test_logits_are_those_of_the_dequantized_model(
    exported: Export, family_dir: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """If a checkpoint has the weights that onnx and numpy dequantize, its export gives the same
    logits."""
    directory = exported("qwen2", kind)
    found = {
        t.name: numpy_helper.to_array(t)
        for t in onnx.load(directory / "verify.onnx").graph.initializer
    }
    model = shutil.copytree(family_dir("qwen2"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in found if name + SCALES in found and parts_of(name)[0] in tensors]:
        levels = found[name].astype(np.float32)
        scales = np.repeat(found[name + SCALES].astype(np.float32), BLOCK, 0)
        minimums = (
            np.repeat(found[name + MINIMUMS].astype(np.float32), BLOCK, 0) if kind == "int4" else 0
        )
        parts = parts_of(name)
        borders = np.cumsum([len(tensors[part]) for part in parts])[:-1]
        rows = np.split((levels * scales + minimums).T, borders)
        tensors |= {part: np.ascontiguousarray(own) for part, own in zip(parts, rows, strict=True)}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    reference = eesd.load(
        export_engine(model, tmp_path / "reference"), "ort", speculation=None, threads=1
    )
    with reference.session(PROMPT) as session:
        expected = session.peek()
    # ONNX Runtime rounds activations to int8.
    for backend, tolerance in (("torch", 1e-4), ("ort", 0.06 * np.abs(expected).max())):
        with eesd.load(directory, backend, speculation=None, threads=1).session(PROMPT) as session:
            np.testing.assert_allclose(session.peek(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ((), {"layers.0", "lm_head"}),
        (("--quantize", "int8"), {"layers.0", "lm_head"}),
        (("--quantize", "int4", "--quantize-head", "none"), {"lm_head"}),
        (("--quantize", "int4", "--quantize-draft", "int8"), set()),
        (("--quantize-draft", "none"), set()),
        (("--dtype", "bfloat16"), set()),
    ],
)
def test_the_draft_has_copies_of_what_verify_has_in_more_bits(
    family_dir: Callable[[str], Path], tmp_path: Path, options: tuple[str, ...], copies: set[str]
) -> None:
    directory = export_engine(family_dir("llama-tied"), tmp_path / "plans", *options, "--check")
    draft, verify = (
        tensor_locations(graph_of(directory, f"{name}.onnx")) for name in ("draft", "verify")
    )
    own = {name for name in draft if name.startswith("draft.")}
    assert {part for part in ("layers.0", "lm_head") if any(part in name for name in own)} == copies
    assert not own & verify.keys()
    assert_weights_match_manifest(directory)
    for backend in ("ort", "torch"):
        check_drafting(eesd.load(directory, backend, threads=1), SPECULATIONS[0], [PROMPT])


def test_the_draft_of_a_large_model_has_4_bits(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's levels are symmetric, as TensorRT requires. The verify graph keeps 16-bit
    weights."""
    monkeypatch.setattr(make, "LARGE_MODEL", 1000)
    plans = export_engine(family_dir("llama-tied"), tmp_path / "plans", "--dtype", "float16")
    found = load_manifest(plans).quantization
    assert (found.layers, found.head) == (None, None) and found.draft is not None
    assert (
        found.draft.weights == "int4" and not found.draft.minimums and not found.draft.zero_points
    )
    none = export_engine(
        family_dir("llama-tied"),
        tmp_path / "none",
        "--dtype",
        "float16",
        "--quantize-draft",
        "none",
    )
    assert load_manifest(none).quantization.draft is None
    linked = export_engine(family_dir("llama-tied"), tmp_path / "linked", "--link-weights")
    assert load_manifest(linked).quantization.draft is None


@pytest.mark.parametrize(
    ("family", "kind", "stages"),
    slow_but(
        list(product(["llama-tied", "qwen2", "llama-head-dim"], KINDS, [1, 2])),
        ("llama-tied", "int4", 1),
        ("qwen2", "int8", 2),
    ),
)
def test_drafting_changes_no_token(exported: Export, family: str, kind: str, stages: int) -> None:
    directory = exported(family, kind, *(("--stages", stages) if stages > 1 else ()))
    for backend in ("ort", "torch"):
        plain = eesd.load(directory, backend, speculation=None, threads=1)
        drafting = [
            eesd.load(directory, backend, speculation=speculation, threads=1)
            for speculation in SPECULATIONS
        ]
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
            expected = plain.generate(PROMPT, sampling, max_new_tokens=120, ignore_eos=True).tokens
            for llm in drafting:
                assert (
                    llm.generate(PROMPT, sampling, max_new_tokens=120, ignore_eos=True).tokens
                    == expected
                )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_drafting_with_the_quantized_bundled_model_is_lossless(tmp_path: Path, kind: str) -> None:
    options = (
        "--model",
        EXAMPLE / "model",
        "--dtype",
        "float32",
        "--quantize",
        kind,
        "-o",
        tmp_path / "plans",
    )
    shown = succeed(export_main, *options, "--check").stdout
    assert f"{kind} layers" in shown and "verify: largest difference" in shown
    same, positions = (
        int(word)
        for word in shown.split("unquantized model's at ")[1].split(" positions")[0].split(" of ")
    )
    assert positions == 64 and same >= {"int8": 61, "int4": 54}[kind]
    assert_lossless(tmp_path / "plans", prompts()[:60:30], Sampling(), 40)


def test_own_lm_head_of_the_exit_head_is_quantized(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = family_dir("qwen3-bias")
    head = trained_head(model, tmp_path / "head", 2, own_lm_head=True)
    directory = export_engine(
        model, tmp_path / "plans", "--exit-head", head, "--quantize", "int4", "--check"
    )
    assert_weights_match_manifest(directory)
    assert "exit_head.lm_head.weight" + SCALES in tensor_locations(
        graph_of(directory, "draft.onnx")
    )


def test_weights_without_whole_blocks_stay_unquantized(text_model: Path, tmp_path: Path) -> None:
    """A model is refused if none of its weights consists of whole blocks."""
    options = ("--exit-layer", 1, "--quantize", "int4")
    shown = succeed(
        export_main, "--model", text_model, "-o", tmp_path / "plans", *options, "--check"
    ).stdout
    assert "weights with 48 inputs stay float32: not a multiple of 32" in shown
    weights = tensor_locations(graph_of(tmp_path / "plans", "verify.onnx"))
    assert {
        name.split(".")[-2]
        for name in weights
        if name.endswith("proj.weight") and name + SCALES not in weights
    } == {"down_proj"}
    assert_weights_match_manifest(tmp_path / "plans")
    odd = build(
        Family("odd", "llama", {"hidden_size": 40, "intermediate_size": 48}), tmp_path / "odd"
    )
    assert_refused(
        run(export_main, "--model", odd, "-o", tmp_path / "no", *options),
        "multiple of 32",
        "40, 48",
    )
    assert "no" not in listing(tmp_path)


def test_inspect_shows_the_quantization(exported: Export) -> None:
    assert (
        "uint4, one float16 scale and minimum for 32 inputs"
        in succeed(inspect_main, exported("qwen2", "int4")).stdout
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quantization", ...),
        ("quantization", "int4"),
        ("quantization/layers/weights", "int3"),
        ("quantization/draft/block", 0),
        ("quantization/draft/block", 16),
        ("quantization/head/scales", "int8"),
        ("quantization/head/minimums", 1),
        ("quantization/tensors", []),
        ("quantization/tensors/model.norm.weight", OWN),
        ("quantization/tensors/model.layers.9.mlp.up_proj.weight", OWN),
        ("quantization/tensors/model.embed_tokens.weight", OWN | {"weights": "uint4"}),
        ("quantization/tensors/model.embed_tokens.weight", OWN | {"block": 8}),
    ],
)
def test_damaged_quantization_in_the_manifest_is_refused(
    exported: Export, tmp_path: Path, path: str, value: object
) -> None:
    directory = shutil.copytree(exported("qwen2", "int4"), tmp_path / "plans")
    edit_manifest(directory, path, value)
    assert_refused(run(inspect_main, directory, "--memory"), "manifest.json is damaged", "export")


def test_torch_engine_refuses_weights_that_differ_from_the_manifest(
    exported: Export, tmp_path: Path
) -> None:
    directory = shutil.copytree(exported("qwen2", "int4"), tmp_path / "plans")
    edit_manifest(directory, "quantization/layers/weights", "int8")
    assert_refused(
        run(run_main, "--engine-dir", directory, "-p", "x", "--backend", "torch"),
        "do not fit its manifest",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_joined_weights_of_an_odd_number_of_outputs(kind: str, tmp_path: Path) -> None:
    """The gate and up projections are joined into one product. If the inner size is odd, some rows
    of their levels and zero points begin within a byte."""
    model = build(
        Family("odd", "llama", {"hidden_size": 64, "intermediate_size": 37}), tmp_path / "odd"
    )
    directory = export_engine(model, tmp_path / "plans", "--quantize", kind)
    for backend in ("ort", "torch"):
        check_drafting(eesd.load(directory, backend, threads=1), SPECULATIONS[0], [PROMPT])
    random = np.random.default_rng(0)
    parts = [
        quantize(random.standard_normal((width, 64), np.float32), kind, "float32")
        for width in (37, 5, 8)
    ]
    joined = join_quantized(parts, 64)
    np.testing.assert_array_equal(
        dequantize(joined, kind), np.concatenate([dequantize(part, kind) for part in parts], 1)
    )


@pytest.mark.parametrize("kind", ["int8", "int4", "uint4", "zero points"])
@pytest.mark.parametrize("width", [12, 7])
def test_parts_of_a_quantized_weight_are_those_of_the_weight(kind: str, width: int) -> None:
    """Outputs and blocks may begin anywhere, even within a byte, with minimums or zero points."""
    random = np.random.default_rng(0)
    whole = quantize(
        random.standard_normal((width, 96), np.float32),
        kind.replace("zero points", "uint4"),
        "float16",
    )
    if kind == "zero points":
        zeros = pack(random.integers(0, 16, (3, width), np.uint8), 4)
        whole = whole._replace(zeros=zeros, minimums=None)
    of = kind.replace("zero points", "uint4")
    for outputs in ([slice(0, width)], [slice(1, 4), slice(5, 6)], [slice(2, 4), slice(4, 6)]):
        part = part_of(whole, of, slice(1, 3), outputs)
        expected = np.concatenate([dequantize(whole, of)[32:96, some] for some in outputs], 1)
        np.testing.assert_array_equal(dequantize(part, of), expected)
        assert len(part.levels) == -(-expected.size * BITS[of] // 8)


def test_rounding_on_a_text_is_closer_to_the_unquantized_model_on_other_text(
    tmp_path: Path,
) -> None:
    """This test uses four layers of the bundled model. It tests the verify graph, and the draft
    that is the whole model. The same text gives the same files."""
    text = tmp_path / "text"
    sources = sorted((Path(make.__file__).parents[1] / "runtime").glob("*.py"))
    text.write_text("".join(file.read_text("utf-8") for file in sources), "utf-8")

    def export(name: str, *options: object) -> Path:
        return export_engine(
            EXAMPLE / "model", tmp_path / name, "--layers", 4, "--exit-head", "quantized", *options
        )

    def logs(engine: Engine) -> torch.Tensor:
        """Returns the log-probabilities of the next token at each position of some held-out
        text."""
        tokens = exact.codec.ids("".join(prompts()[:10]), special=False)[:256]
        [cache] = engine.new_kv_caches()
        logits = torch.tensor(
            engine.forward([Call(cache, tokens, range(len(tokens)), 0)])[0].logits
        )
        return logits.log_softmax(-1)

    def divergence(found: torch.Tensor) -> float:
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    plain = export("plain")
    rounded = export("rounded", "--round-on", text, "--check")
    exact, drafting = (eesd.load(plans, activations="float32") for plans in (plain, rounded))
    expected = logs(exact.engines.verify)
    assert exact.engines.draft is not None and drafting.engines.draft is not None
    assert divergence(logs(drafting.engines.draft)) < 0.9 * divergence(logs(exact.engines.draft))
    assert torch.equal(logs(drafting.engines.verify), expected)
    again = export("again", "--round-on", text)
    assert (again / "weights.bin").read_bytes() == (rounded / "weights.bin").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"text", "plain", "rounded", "again"}

    (tmp_path / "short").write_text("def f(): pass")
    for wrong, words in (
        (
            ("--quantize", "int4", "--round-on", tmp_path / "short"),
            ("tokens", "needs at least", "longer text"),
        ),
        (
            ("--quantize", "none", "--quantize-draft", "none", "--round-on", text),
            ("--quantize int4",),
        ),
    ):
        refused = run(
            export_main,
            "--model",
            EXAMPLE / "model",
            "--output",
            tmp_path / "no",
            "--layers",
            4,
            *wrong,
        )
        assert_refused(refused, *words)


NARROW = ("--dtype", "bfloat16", "--check")
DRAFTING = Speculation("fixed:k=3", 2, guard=False)
LEVELS = {"fp8": (FP8, ml_dtypes.float8_e4m3fn, 256), "nvfp4": (FP4, ml_dtypes.float4_e2m1fn, 16)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_levels_are_the_nearest_ones(kind: str, dtype: str) -> None:
    """Another library decodes the stored scales and every possible level. The chosen levels are
    those with the nearest values."""
    levels, numbers, count = LEVELS[kind]
    stored = random_weight(37, 96, dtype)
    weight = to_float32(stored)
    found = quantize(stored, levels, dtype)
    bits = np.arange(count, dtype=np.uint8).view(numbers).astype(np.float32)
    grid = np.sort(bits[np.isfinite(bits)])
    scales = found.whole_scales.T.repeat(96 // len(found.scales), 1)[:, :, None]
    nearest = np.abs(grid * scales - weight[:, :, None]).min(2)
    values = dequantize(found, levels).T
    np.testing.assert_allclose(np.abs(values - weight), nearest, rtol=1e-5, atol=1e-12)
    if kind == "nvfp4":  # scales are nearly as good as the best ones
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
    """The export compares packed graphs with modules whose layers are not packed."""
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
    """The greedy and sampled tokens equal the tokens of plain decoding. The logits of all backends
    and of the graphs are close to each other."""
    directory = exported(family, kind, "--dtype", dtype, "--check")
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
    logits.append(reference_logits(directory)[-1])
    # On processors that multiply bfloat16, torch rounds more.
    share = 0.05 if dtype == "float16" else 0.1
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], rtol=0, atol=share * np.abs(logits[0]).max())


def of_backend(directory: Path, backend: str) -> NDArray[np.float32]:
    """Returns the logits after the prompt, after a check that drafting changes no token."""
    llm = eesd.load(directory, backend, threads=1)
    check_drafting(llm, DRAFTING, [PROMPT])
    with llm.with_speculation(None).session(PROMPT) as session:
        return session.peek().copy()


@needs_operators()
def test_operators_multiply_by_the_values_of_the_graph(exported: Export) -> None:
    """With float32 activations, the operators and the graph compute the same products up to
    rounding to 16 bits."""
    for kind in LEVELS:
        directory = exported("qwen2", kind, *NARROW)
        with eesd.load(
            directory, "ort", speculation=None, threads=1, activations="float32"
        ).session(PROMPT) as session:
            own = session.peek().copy()
        np.testing.assert_allclose(
            own, reference_logits(directory)[-1], rtol=0, atol=1e-4 * np.abs(own).max()
        )


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
        shown = succeed(inspect_main, exported("qwen2", kind, *NARROW)).stdout
        assert kind in shown and "float" not in shown.replace("bfloat16", "").replace("float32", "")


def test_a_manifest_with_other_small_floats_is_refused(exported: Export, tmp_path: Path) -> None:
    """In these cases the manifest has minimums, or it has a block size or a scale type that the
    export does not write."""
    for number, (name, value) in enumerate(
        (("minimums", True), ("block", 64), ("scales", "float16"))
    ):
        copy = shutil.copytree(exported("qwen2", "nvfp4", *NARROW), tmp_path / str(number))
        edit_manifest(copy, f"quantization/layers/{name}", value)
        assert_refused(run(run_main, "--engine-dir", copy, "--prompt", "a"), "manifest.json")


def test_plans_are_built_for_the_gpus_that_know_the_type(exported: Export, tmp_path: Path) -> None:
    """TensorRT-RTX cannot build plans for older GPUs. If no GPUs are named, the build fails."""
    pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")
    for kind, oldest, wanted in (("fp8", "8.6", "8.9"), ("nvfp4", "8.9", "12.0")):
        copy = shutil.copytree(exported("qwen2", kind, *NARROW), tmp_path / kind)
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
