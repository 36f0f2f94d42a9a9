"""``eesd-export --quantize``: the blocks are exact, every backend computes with them, and drafting stays lossless."""

import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

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
from support.engine_dirs import assert_weights_match_manifest, edit_manifest, graph_of, tensor_locations, trained_head
from support.tiny_checkpoints import Family, build

import eesd
from eesd.common.manifest_reader import load_manifest
from eesd.common.weights import BLOCK, SCALES
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.model.quantize import LEVELS, dequantize, quantize
from eesd.runtime.cli import main as run_main
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import Speculation

KINDS = ("int8", "int4")
PROMPT = [1, 17, 5, 40, 3, 88, 61]
SPECULATIONS = [Speculation("fixed:k=3", guard=False), Speculation("beta-ts", tree_width=3, guard=False)]
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function that returns the quantized engines of a family. Tests must not change them."""

    @cache
    def directory(family: str, kind: str, *options: object) -> Path:
        output = tmp_path_factory.mktemp("quantized") / f"{family}-{kind}"
        return export_engine(family_dir(family), output, "--quantize", kind, *options)

    return directory


def unpacked(stored: torch.Tensor, kind: str, shape: tuple[int, int]) -> NDArray[np.int8]:
    """The levels as the ONNX format defines them: of two int4 values the first is in the low half of the byte."""
    data = stored.numpy().tobytes()
    if kind == "int8":
        return np.frombuffer(data, np.int8).reshape(shape)
    halves = [half for byte in data for half in (byte & 15, byte >> 4)]
    return np.array([half - 16 if half > 7 else half for half in halves], np.int8).reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_within_half_a_scale(kind: str, dtype: torch.dtype) -> None:
    """Scales go down to float16's subnormal numbers; the number of outputs is odd."""
    torch.manual_seed(0)
    outputs, inputs = 37, 7 * BLOCK
    weight = (torch.randn(outputs, inputs) * torch.logspace(-8, 2, outputs)[:, None]).to(dtype)
    weight[5] = 0
    stored, scales = quantize(weight, kind, dtype)
    assert scales.dtype == dtype and scales.shape == (inputs // BLOCK, outputs)
    levels = unpacked(stored, kind, (inputs, outputs))
    assert levels.max() == LEVELS[kind] == -levels.min()
    scale = np.repeat(scales.float().numpy(), BLOCK, 0)
    assert (scale > 0).all()
    expected = weight.float().numpy().T
    assert (np.abs(levels * scale - expected) <= scale * 0.5001).all()
    np.testing.assert_array_equal(dequantize(stored, scales.float(), kind).numpy(), levels * scale)


def test_result_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 5 * BLOCK)
    whole = quantize(weight, "int4", torch.float16)
    monkeypatch.setattr("eesd.model.quantize._PIECE", 2 * BLOCK * 33)
    assert all(torch.equal(*pair) for pair in zip(quantize(weight, "int4", torch.float16), whole, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "llama-bias"])
def test_graphs_are_standard_and_quantize_only_linear_weights(exported: Export, family: str, kind: str) -> None:
    """Both graphs share the quantized weights."""
    directory = exported(family, kind)
    manifest = load_manifest(directory)
    stored: dict[str, tuple[int, int]] = {}
    for graph in manifest.graphs:
        onnx.checker.check_model(directory / graph.file, full_check=True)
        model = graph_of(directory, graph.file)
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
        types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        quantized = {name for name in types if name + SCALES in types}
        assert {types[name] for name in quantized} == {TensorProto.DataType.Value(kind.upper())}
        dequantized = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
        products = [node.input[1] for node in model.graph.node if node.op_type == "MatMul"]
        assert set(dequantized.values()) == quantized and dequantized.keys() <= set(products)
        assert len(products) - len(dequantized) == manifest.geometry.tied_embeddings
        assert ("lm_head.weight" in quantized) == (not manifest.geometry.tied_embeddings)
        assert not any(word in name for name in quantized for word in ("norm", "embed", "bias", "cos", "sin"))
        for name, location in tensor_locations(model).items():
            assert stored.setdefault(name, location) == location


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_keeps_int4_packed_and_widens_int8(exported: Export, tmp_path: Path, kind: str) -> None:
    """int4 becomes MatMulNBits. int8 has no kernel for float32 activations and is folded into plain weights."""
    directory = exported("qwen2", kind)
    made: list[ort.SessionOptions] = []
    original = ort.SessionOptions

    def recorded() -> ort.SessionOptions:
        made.append(original())
        made[-1].optimized_model_filepath = str(tmp_path / "optimized.onnx")
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "SessionOptions", recorded)
        eesd.load(directory, "ort", speculation=None)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node]
    assert "DequantizeLinear" not in kinds
    assert (kinds.count("MatMulNBits"), kinds.count("MatMul") > 20) == ((24, False) if kind == "int4" else (0, True))


@pytest.mark.parametrize("kind", slow_but(list(KINDS), "int4"))
def test_logits_are_those_of_the_dequantized_model(
    exported: Export, family_dir: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """A checkpoint with the weights as onnx and numpy read them exports to engines with the same logits."""
    directory = exported("qwen2", kind)
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(directory / "verify.onnx").graph.initializer}
    model = shutil.copytree(family_dir("qwen2"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name + SCALES in found]:
        scales = np.repeat(found[name + SCALES], BLOCK, 0)
        tensors[name] = np.ascontiguousarray((found[name].astype(np.float32) * scales).T)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    reference = export_engine(model, tmp_path / "reference")
    for speculation in (None, SPECULATIONS[0]):
        quantized, exact = (eesd.load(path, "ort", speculation=speculation, threads=1) for path in (directory, reference))
        with quantized.session(PROMPT) as one, exact.session(PROMPT) as other:
            np.testing.assert_allclose(one.peek(), other.peek(), rtol=0, atol=1e-4)
        tokens, wanted = (llm.generate(PROMPT, max_new_tokens=60, ignore_eos=True) for llm in (quantized, exact))
        assert tokens.tokens == wanted.tokens and tokens.stats.accepted_tokens == wanted.stats.accepted_tokens


@pytest.mark.parametrize(
    ("family", "kind", "stages"),
    slow_but(
        list(product(["llama-tied", "qwen2", "llama-head-dim"], KINDS, [1, 2])),
        ("llama-tied", "int4", 1),
        ("qwen2", "int8", 2),
    ),
)
def test_drafting_and_the_torch_engine_change_no_token(exported: Export, family: str, kind: str, stages: int) -> None:
    directory = exported(family, kind, *(("--stages", stages) if stages > 1 else ()))
    plain, torch_engine = (eesd.load(directory, backend, speculation=None, threads=1) for backend in ("ort", "torch"))
    drafting = [eesd.load(directory, "ort", speculation=speculation, threads=1) for speculation in SPECULATIONS]
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        expected = plain.generate(PROMPT, sampling, max_new_tokens=120, ignore_eos=True).tokens
        for llm in (torch_engine, *drafting):
            assert llm.generate(PROMPT, sampling, max_new_tokens=120, ignore_eos=True).tokens == expected
    with plain.session(PROMPT) as one, torch_engine.session(PROMPT) as other:
        np.testing.assert_allclose(one.peek(), other.peek(), rtol=0, atol=1e-4)


def test_torch_engine_runs_quantized_weights_in_bfloat16(exported: Export) -> None:
    directory = exported("qwen2", "int4", "--dtype", "bfloat16", "--check")
    llm = eesd.load(directory, "torch", speculation=SPECULATIONS[0], threads=1)
    assert len(llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens) == 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_drafting_with_the_quantized_bundled_model_is_lossless(tmp_path: Path, kind: str) -> None:
    options = ("--model", EXAMPLE / "model", "--dtype", "float32", "--quantize", kind, "-o", tmp_path / "plans")
    shown = succeed(export_main, *options, "--check").stdout
    assert "float32 with " + kind in shown and "verify: largest difference" in shown
    same, positions = (int(word) for word in shown.split("unquantized model's at ")[1].split(" positions")[0].split(" of "))
    assert positions == 64 and same >= {"int8": 61, "int4": 54}[kind]
    assert_lossless(tmp_path / "plans", prompts()[:60:30], Sampling(), 40)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama-tied", ("--stages", 3), marks=pytest.mark.slow),
        pytest.param("llama-bias", ("--dtype", "bfloat16"), marks=pytest.mark.slow),
        pytest.param("qwen3", ("--stages", 2), marks=pytest.mark.slow),
    ],
)
def test_manifest_counts_the_bytes_of_quantized_weights(exported: Export, family: str, options: tuple[object, ...]) -> None:
    for kind in KINDS:
        assert_weights_match_manifest(exported(family, kind, *options))


def test_own_lm_head_of_the_exit_head_is_quantized(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = family_dir("qwen3-bias")
    head = trained_head(model, tmp_path / "head", 2, own_lm_head=True)
    directory = export_engine(model, tmp_path / "plans", "--exit-head", head, "--quantize", "int4", "--check")
    assert_weights_match_manifest(directory)
    assert "exit_head.lm_head.weight" + SCALES in tensor_locations(graph_of(directory, "draft.onnx"))


def test_weights_without_whole_blocks_stay_unquantized(text_model: Path, tmp_path: Path) -> None:
    """A model with only such weights is refused."""
    options = ("--exit-layer", 1, "--quantize", "int4")
    shown = succeed(export_main, "--model", text_model, "-o", tmp_path / "plans", *options, "--check").stdout
    assert "weights with 48 inputs stay float32: not a multiple of 32" in shown
    weights = tensor_locations(graph_of(tmp_path / "plans", "verify.onnx"))
    assert {name.split(".")[-2] for name in weights if name.endswith("proj.weight") and name + SCALES not in weights} == {
        "down_proj"
    }
    assert_weights_match_manifest(tmp_path / "plans")
    odd = build(Family("odd", "llama", {"hidden_size": 40, "intermediate_size": 48}), tmp_path / "odd")
    assert_refused(run(export_main, "--model", odd, "-o", tmp_path / "no", *options), "multiple of 32", "40, 48")
    assert "no" not in listing(tmp_path)


def test_unknown_quantization_is_refused(text_model: Path, tmp_path: Path) -> None:
    result = run(export_main, "--model", text_model, "-o", tmp_path / "plans", "--exit-layer", 1, "--quantize", "int3")
    assert result.exit_code == 2 and "'int3' is not one of 'int8', 'int4'" in result.stderr
    assert not listing(tmp_path)


def test_inspect_shows_the_quantization(exported: Export) -> None:
    assert "int4, one scale for 32 inputs" in succeed(inspect_main, exported("qwen2", "int4")).stdout


@pytest.mark.parametrize(
    ("path", "value"),
    [("quantization", ...), ("quantization", "int4"), ("quantization/weights", "int3"), ("quantization/block", 0)],
)
def test_damaged_quantization_in_the_manifest_is_refused(exported: Export, tmp_path: Path, path: str, value: object) -> None:
    directory = shutil.copytree(exported("qwen2", "int4"), tmp_path / "plans")
    edit_manifest(directory, path, value)
    assert_refused(run(run_main, "--engine-dir", directory, "-p", "x"), "manifest.json is damaged", "export")


def test_torch_engine_refuses_weights_that_differ_from_the_manifest(exported: Export, tmp_path: Path) -> None:
    directory = shutil.copytree(exported("qwen2", "int4"), tmp_path / "plans")
    edit_manifest(directory, "quantization/weights", "int8")
    assert_refused(run(run_main, "--engine-dir", directory, "-p", "x", "--backend", "torch"), "do not fit its manifest")
