"""Tests that ``eesd-export`` writes complete directories of standard graphs, and that these graphs
generate the tokens of transformers."""

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from support import tiny_models
from support.command import assert_refused, export_engine, exported_files, run, succeed
from support.engine_dirs import graph_of, tensor_locations, trained_head
from transformers import AutoModelForCausalLM

import eesd
from eesd.common import terminal
from eesd.common.geometry import ExitConfig
from eesd.common.integrity import sha256_of, verify_files
from eesd.common.manifest import MANIFEST_FILE, WEIGHTS_FILE, Manifest, load_manifest
from eesd.common.weights import ROTARY_TABLES
from eesd.export import steps
from eesd.export.cli import main as export_main
from eesd.export.onnx_ops import FEW_NODES, OnnxOperations
from eesd.export.plan_graph import fold_heads
from eesd.export.weights import ALIGNMENT
from eesd.model.checkpoint import Checkpoint
from eesd.model.tokenizer_files import resolved_tokenizer
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.ort_engine import open_on_device
from eesd.runtime.llm import Speculation

FamilyDir = Callable[[str], Path]
GRAPHS = ("draft.onnx", "verify.onnx")
FAMILIES = ("llama-head-dim", "llama-tied", "qwen2", "qwen3")
PROMPT = [1, 17, 5, 40, 3, 88, 61]


@pytest.fixture(scope="module")
def exported(
    family_dir: FamilyDir, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns a function that gives the float32 engines of a family."""

    @cache
    def directory(name: str) -> Path:
        return export_engine(
            family_dir(name), tmp_path_factory.mktemp("exported") / name, "--quantize-draft", "none"
        )

    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_manifest_describes_the_export(
    exported: Callable[[str], Path], family_dir: FamilyDir, family: str
) -> None:
    directory = exported(family)
    config = Checkpoint(family_dir(family)).config
    manifest = load_manifest(directory)
    assert manifest.geometry == config.geometry and manifest.dtype == config.dtype
    assert (manifest.exit_head.layer, manifest.exit_head.blocks, manifest.exit_head.trained) == (
        1,
        1,
        False,
    )
    assert (manifest.max_seq_len, manifest.max_tree_nodes, manifest.draft_top_k) == (256, 32, 8)
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (1, (2,))
    assert manifest.exit_head.base == Checkpoint(family_dir(family)).fingerprint()
    assert exported_files(directory) == sorted([MANIFEST_FILE, *manifest.files])
    assert {*GRAPHS, WEIGHTS_FILE} <= manifest.files.keys()
    verify_files(directory, manifest)
    assert {"eesd", "onnx"} <= manifest.tools.keys()
    assert Manifest.to_json(manifest) == (directory / MANIFEST_FILE).read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_weight_is_stored_once(
    exported: Callable[[str], Path], family_dir: FamilyDir, family: str
) -> None:
    directory = exported(family)
    draft, verify = (tensor_locations(graph_of(directory, name)) for name in GRAPHS)
    assert all(verify[name] == location for name, location in draft.items() if name in verify)
    assert "model.embed_tokens.weight" in draft.keys() & verify.keys()
    stored = sorted((draft | verify).values())
    assert all(
        end <= start
        for (_, end), (start, _) in zip(_intervals(stored), _intervals(stored)[1:], strict=False)
    )
    assert all(offset % ALIGNMENT == 0 for offset, _ in stored)

    checkpoint = Checkpoint(family_dir(family))
    # These are the weights for the keys and values of the exit head, which only the verify graph
    # uses.
    keys_values = [length for name, (_, length) in verify.items() if ".kv_proj." in name]
    block = [
        t.nbytes
        for name, t in checkpoint.tensors.items()
        if "layers.0." in name or name == "model.norm.weight"
    ]
    tables = 2 * 256 * checkpoint.config.geometry.head_dim // 2 * 4
    total = sum(t.nbytes for t in checkpoint.tensors.values()) + sum(block) + tables
    total += sum(keys_values)
    assert sum(length for _, length in stored) == total
    assert total <= (directory / WEIGHTS_FILE).stat().st_size < total + ALIGNMENT * len(stored)


def _intervals(stored: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(offset, offset + length) for offset, length in stored]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_are_standard(exported: Callable[[str], Path], family: str, name: str) -> None:
    directory = exported(family)
    onnx.checker.check_model(directory / name, full_check=True)
    model = graph_of(directory, name)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    assert not model.functions and all(node.domain == "" for node in model.graph.node)
    caches = len(model.graph.input) // 2 - 2
    attention = [node for node in model.graph.node if node.op_type == "Attention"]
    # TensorRT's parser accepts only one output of Attention. In the verify graph, the last exit
    # block only writes its caches.
    assert [len(node.output) for node in attention] == [1] * (
        caches if name == "draft.onnx" else caches - 1
    )
    masks = {node.input[3] for node in attention}
    if name == "draft.onnx":
        assert masks == {"attn_mask"}
    else:  # all layers share a mask with a row for each query of a KV head
        makers = [node.op_type for node in model.graph.node if masks.intersection(node.output)]
        assert len(masks) == 1 and makers in (["Tile"], ["Concat"])
    scatters = [node for node in model.graph.node if node.op_type == "TensorScatter"]
    assert len(scatters) == 2 * caches
    assert all(onnx.helper.get_node_attr_value(node, "axis") == 2 for node in scatters)
    assert {node.input[2] for node in scatters} == {"write_indices"}


def test_steps_are_logged_where_there_is_no_terminal(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long step that reports no bytes is logged as running."""
    monkeypatch.setattr(terminal, "SILENCE", 0.01)
    monkeypatch.setattr(steps, "SILENCE", 0.01)
    options = ("--exit-layer", 1, "-o", tmp_path / "plans", "--no-check")
    said = succeed(export_main, "--model", family_dir("llama-tied"), *options).stderr
    for step in ("loading the tokenizer", "writing the weights"):
        assert f"{step} ...\n" in said
    assert re.search(r"^[a-z ]+, \d+ s \.\.\.$", said, re.MULTILINE)


@pytest.mark.parametrize(
    "reads", [("ReduceSum", None), ("GatherElements", None), ("GatherElements", "write_indices")]
)
def test_a_second_reader_of_a_cache_is_refused(
    family_dir: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: tuple[str, str | None],
) -> None:
    """ONNX Runtime 1.31 runs a ReduceSum after the write that follows it in the graph. A copy of
    values that the write needs is allowed, because it cannot run later."""
    kind, needed = reads
    write = OnnxOperations._write

    def read_too(o: OnnxOperations, cache: str, new: str) -> str:
        if kind == "ReduceSum":
            o.node(kind, [cache])
            return write(o, cache, new)
        zeros = o.node("Mul", [o.node("Cast", [new], to=TensorProto.INT64), o.constant(0)])
        copied = o.node(kind, [cache, zeros], axis=2)
        return write(o, cache, o.node("Add", [copied, new]) if needed else new)

    monkeypatch.setattr(OnnxOperations, "_write", read_too)
    options = ("--exit-layer", 1, "-o", tmp_path / "plans", "--no-check")
    result = run(export_main, "--model", family_dir("llama-tied"), *options)
    if needed:
        assert result.exit_code == 0, result.output
    else:
        assert_refused(result, f"a {kind} reads key_", "report this model")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_compute_no_shapes_and_transpose_no_weights(
    exported: Callable[[str], Path], name: str
) -> None:
    model = graph_of(exported("llama-head-dim"), name)
    weights = tensor_locations(model).keys()
    kinds = Counter(node.op_type for node in model.graph.node)
    # These nodes select whether heads are folded.
    assert kinds["Shape"] == kinds["Where"] == 2 * (name == "verify.onnx")
    assert not kinds.keys() & {
        "Concat",
        "Expand",
        "Unsqueeze",
        "Identity",
        "SplitToSequence",
        "SequenceAt",
    }
    assert not any(
        node.op_type == "Transpose" and node.input[0] in weights for node in model.graph.node
    )


def test_heads_are_apart_or_folded_with_the_same_bits(
    exported: Callable[[str], Path], tmp_path: Path
) -> None:
    """Calls with many nodes keep the query heads separate. The graphs of plans never do this."""
    directory = exported("llama-head-dim")
    manifest = load_manifest(directory)
    folded = tmp_path / "folded"
    shutil.copytree(directory, folded)
    model = graph_of(directory, "verify.onnx")
    fold_heads(model.graph)
    assert not {"Where", "Shape", "Less"} & {node.op_type for node in model.graph.node}
    (folded / "verify.onnx").write_bytes(model.SerializeToString())
    engines = [
        open_on_device(path, manifest, 1, draft=False, device="cpu")[0]
        for path in (directory, folded)
    ]
    random = np.random.default_rng(0)
    few = FEW_NODES
    for batch, nodes in (
        (1, 1),
        (1, few),
        (1, few + 1),
        (1, 17),
        (1, 100),
        (2, few),
        (2, 2 * few + 1),
        (3, 2),
    ):
        tokens = random.integers(0, manifest.geometry.vocab_size, (batch, nodes)).tolist()
        found = []
        for engine in engines:
            rows = list(zip(engine.new_kv_caches(batch), tokens, strict=True))
            rows[0][0].reserve(20 + nodes)
            calls = [Call(kv_cache, ids, range(20, 20 + nodes), 20) for kv_cache, ids in rows]
            found.append(np.stack([output.logits.copy() for output in engine.forward(calls)]))
        assert np.array_equal(found[0], found[1]), (batch, nodes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_engines_have_16_bit_weights_and_caches(
    exported: Callable[[str], Path], family_dir: FamilyDir, tmp_path: Path, dtype: str
) -> None:
    options = [
        "--model",
        family_dir("qwen2"),
        "--exit-layer",
        1,
        "-o",
        tmp_path / "plans",
        "--dtype",
        dtype,
    ]
    result = succeed(export_main, *options, "--check")
    before = result.stdout.splitlines()[:2]
    after = result.stdout.splitlines()[2:]
    assert [line.split(":")[0] for line in after[1:-1]] == ["draft", "verify", "verify"] and after[
        -1
    ].startswith("exported in")
    assert "Qwen2ForCausalLM, 3 layers of 64" in before[0] and "free on disk" in before[1]
    manifest = load_manifest(tmp_path / "plans")
    assert manifest.dtype == dtype
    ids = ("input_ids", "position_ids", "write_indices", "logit_rows")
    assert {
        tensor.name: tensor.dtype for tensor in manifest.verify[0].inputs if tensor.dtype != dtype
    } == dict.fromkeys(ids, "int64")
    assert [tensor.dtype for tensor in manifest.draft.outputs[:3]] == [
        "float32",
        "int64",
        "float32",
    ]
    for name in GRAPHS:
        onnx.checker.check_model(tmp_path / "plans" / name, full_check=True)
    directories = tmp_path / "plans", exported("qwen2")
    narrow, wide = (tensor_locations(graph_of(d, GRAPHS[1])) for d in directories)
    tables = dict.fromkeys(ROTARY_TABLES, 1)  # float32 in both
    doubled = {name: tables.get(name, 2) * length for name, (_, length) in narrow.items()}
    assert doubled == {name: length for name, (_, length) in wide.items()}


@pytest.mark.parametrize(("blocks", "own_lm_head"), [(1, True), (2, False), (3, True)])
def test_engines_of_trained_heads_generate_the_tokens_of_transformers(
    family_dir: FamilyDir, tmp_path: Path, blocks: int, own_lm_head: bool
) -> None:
    """The tokens come from plain decoding, chains and trees."""
    model = family_dir("qwen3-bias")
    head = trained_head(model, tmp_path / "head", blocks, own_lm_head)
    directory = export_engine(model, tmp_path / "plans", "--exit-head", head, "--check")
    manifest = load_manifest(directory)
    assert (manifest.exit_head.blocks, manifest.exit_head.trained) == (blocks, True)
    assert manifest.draft.caches == (0, *range(3, 3 + blocks))
    weights = tensor_locations(graph_of(directory, "draft.onnx"))
    assert ("exit_head.lm_head.weight" in weights) == own_lm_head
    assert ("draft.lm_head.weight" in weights) != own_lm_head
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = reference(prompt).logits[0, -1].numpy()
    tokens = reference.generate(prompt, max_new_tokens=24, do_sample=False)[
        0, len(PROMPT) :
    ].tolist()
    for speculation in (
        None,
        Speculation("fixed:k=3", guard=False),
        Speculation("fixed:k=3", tree=3, guard=False),
    ):
        llm = eesd.load(directory, speculation=speculation, threads=1)
        with llm.session(PROMPT) as session:
            assert abs(session.peek() - expected).max() < 1e-4
        assert llm.generate(PROMPT, max_new_tokens=24).tokens == tokens


def test_head_in_the_model_directory_is_the_default(tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "model", 97, layers=3, damping=0.3, seed=0)
    trained_head(model, model, blocks=1, own_lm_head=False, layer=2)
    for options in ([], ["--exit-layer", 2]):
        result = succeed(export_main, "--model", model, "-o", tmp_path / "plans", *options)
        assert "exit after layer 2" in result.stdout and "not trained" not in result.output.lower()
        manifest = load_manifest(tmp_path / "plans")
        assert (manifest.exit_head.layer, manifest.exit_head.trained) == (2, True)


def test_tokenizer_files_are_those_that_transformers_makes(text_model: Path, engine: Path) -> None:
    files = resolved_tokenizer(text_model)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for name, content in files.items():
        assert (engine / name).read_bytes() == content
        assert load_manifest(engine).files[name].sha256 == sha256_of(engine / name)


def test_limits_apply_to_graphs_and_decoding(text_model: Path, tmp_path: Path) -> None:
    options = ["--max-seq-len", 40, "--max-tree-nodes", 5, "--draft-top-k", 3]
    directory = export_engine(text_model, tmp_path / "plans", *options)
    manifest = load_manifest(directory)
    assert (manifest.max_seq_len, manifest.max_tree_nodes, manifest.draft_top_k) == (40, 5, 3)
    assert [tensor.shape for tensor in manifest.draft.outputs[1:3]] == [("B", "n", 3)] * 2
    assert (
        tensor_locations(graph_of(directory, "draft.onnx"))["cos"][1]
        == 40 * manifest.geometry.head_dim // 2 * 4
    )
    for width in (1, 3):
        llm = eesd.load(
            directory, speculation=Speculation("fixed:k=30", width, guard=False), threads=1
        )
        completion = llm.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
        assert len(completion.tokens) == 40 - len(PROMPT) and completion.finish_reason == "length"
        assert 0 < completion.stats.draft_tokens <= 5 * completion.stats.drafting_rounds


def test_draft_reports_at_most_as_many_candidates_as_tokens(tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "model", 5, layers=2, damping=0.5, seed=0)
    assert load_manifest(export_engine(model, tmp_path / "plans")).draft_top_k == 5


def test_manifest_is_json_of_format_version_1(engine: Path) -> None:
    raw = json.loads((engine / MANIFEST_FILE).read_text())
    assert raw["format_version"] == 1 and raw["verify"][0]["inputs"][5]["shape"] == ["B", 2, "S", 8]
    assert raw["geometry"]["rope_theta"] == 10000.0 and raw["geometry"]["rope_scaling"] is None
    assert raw["exit_head"].keys() == {field.name for field in dataclasses.fields(ExitConfig)}
