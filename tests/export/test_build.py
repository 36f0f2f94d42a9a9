"""Tests of ``eesd-build`` with plans that TensorRT-RTX builds without a GPU. Skipped without
TensorRT-RTX."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession
from support import tiny_models
from support.command import (
    add_tokenizer,
    assert_refused,
    export_engine,
    listing,
    run,
    slow_but,
    succeed,
)
from support.eagle_heads import deep_head, write_head
from support.engine_dirs import record
from support.family_grid import FamilyCase
from support.killing import kill_command
from support.tiny_checkpoints import FAMILIES, GEOMETRY

pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")

from eesd.common.integrity import sha256_of
from eesd.common.manifest import load_manifest
from eesd.common.weights import weight_bytes
from eesd.export import build as build_cli
from eesd.export import inspect, plan_graph, plans
from eesd.export.build import main
from eesd.export.cache import is_build
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.trt_plans import attended_slots, refit_digest

FEED = Path(__file__).parents[2] / "examples/polygraphy/feed.py"
TYPES = ("float16", pytest.param("bfloat16", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def built(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 engine directory with its plans. Tests that change it must copy it."""
    directory = export_engine(
        family_dir("qwen2"), tmp_path_factory.mktemp("built") / "plans", "--dtype", "float16"
    )
    succeed(main, directory)
    return directory


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "plans")


def fused(directory: Path, *options: object) -> list[tuple[int, int]]:
    """Build plans. Returns two numbers for each plan. They say how many attentions and how many
    cache updates run as a single kernel. The draft's plan comes first."""
    assert "single kernels" not in succeed(main, directory, *options).stderr
    manifest = load_manifest(directory)
    assert list(manifest.plans) == [graph.file for graph in manifest.graphs]
    return [(plan.fused_attentions, plan.fused_cache_updates) for plan in manifest.plans.values()]


SHORT = ("--max-seq-len", 32, "--max-tree-nodes", 8, "--no-check")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", slow_but(list(FAMILIES), "qwen3-bias"))
def test_attentions_and_cache_updates_of_every_family_are_single_kernels(
    family_dir: Callable[[str], Path], tmp_path: Path, name: str, dtype: str
) -> None:
    directory = export_engine(family_dir(name), tmp_path / "plans", "--dtype", dtype, *SHORT)
    manifest = load_manifest(directory)
    geometry = manifest.geometry
    shared = sum(map(geometry.shares, range(geometry.num_layers)))
    attentions = len(geometry.attention_layers) + shared
    draft = (1 if name == "lfm2" else 2), 2 * len(manifest.draft.caches)
    assert fused(directory) == [draft, (attentions, 2 * manifest.num_caches)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", slow_but(["none", "int8", "int4"], "int4"))
def test_those_of_stages_are_single_kernels(
    family_dir: Callable[[str], Path], tmp_path: Path, kind: str, dtype: str
) -> None:
    options = ("--dtype", dtype, "--quantize", kind, "--stages", 2, *SHORT)
    directory = export_engine(family_dir("qwen2"), tmp_path / "plans", *options)
    stages = zip(
        load_manifest(directory).verify, load_manifest(directory).stage_layers, strict=True
    )
    assert fused(directory)[1:] == [
        (len(layers), 2 * len(graph.caches)) for graph, layers in stages
    ]


@pytest.mark.parametrize("dtype", TYPES)
def test_those_of_other_drafts_are_single_kernels(
    family_dir: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    """The directories have different drafts: a head with a deep cache, the whole model in 4 bits, a
    model's own exit, and an EAGLE-3 head. One directory has no draft."""
    model = tiny_models.build(tmp_path / "model", 97, layers=7, damping=1.0, seed=0, head_dim=16)
    add_tokenizer(model)
    deep_head(Checkpoint(family_dir("qwen3-bias")), tmp_path / "deep")
    eagle = write_head(
        tmp_path / "eagle",
        json.loads((model / "config.json").read_text()),
        "safeailab",
        draft_vocab=50,
    )
    for source, head, expected in (
        (family_dir("qwen3-bias"), (tmp_path / "deep",), [(2, 6), (3, 10)]),
        (family_dir("qwen2"), ("quantized",), [(3, 6), (3, 6)]),
        (model, ("own", "--exit-layer", 2), [(2, 4), (7, 14)]),
        (model, (eagle,), [(1, 4), (7, 18)]),
        (family_dir("qwen2"), ("none",), [(3, 6)]),
    ):
        directory = export_engine(
            source, tmp_path / "plans", "--dtype", dtype, "--exit-head", *head, *SHORT
        )
        assert fused(directory) == expected


def test_a_draft_of_all_layers_reads_the_caches_where_they_are(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Levels with minimums are refused."""
    options = ("--dtype", "float16", *SHORT, "--exit-head", "quantized")
    directory = export_engine(family_dir("qwen2"), tmp_path / "plans", *options)
    succeed(main, directory)
    manifest = load_manifest(directory)
    assert manifest.plans["draft.onnx"].profiles == ((1, 1, 1),)
    assert attended_slots(manifest, manifest.draft) == (manifest.gpu_slots,)
    export_engine(family_dir("qwen2"), tmp_path / "plans", *options, "--asymmetric")
    assert_refused(run(main, directory), "minimums", "export with --symmetric")


def test_only_int8_scales_that_are_equal_in_all_blocks_are_joined(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """A checkpoint's own levels may have different scales."""
    options = ("--dtype", "float16", "--quantize", "int8", "--max-seq-len", 64, "--no-check")
    directory = export_engine(family_dir("qwen2"), tmp_path / "plans", *options)
    before = dequantized(directory)
    joined = dequantized(directory, plan_graph.join_scales)
    assert len(before) > 4 and all(
        joined[name] == (1, shape[1:]) for name, (_, shape) in before.items()
    )
    name = next(iter(before))
    (entry,) = (
        t
        for t in onnx.load(directory / "verify.onnx", load_external_data=False).graph.initializer
        if t.name == name
    )
    with (directory / "weights.bin").open("r+b") as file:
        file.seek(int(next(pair.value for pair in entry.external_data if pair.key == "offset")))
        file.write(b"\x01")
    assert dequantized(directory, plan_graph.join_scales) == joined | {name: before[name]}


def dequantized(
    directory: Path, change: Callable[[Any, Path], None] = lambda *_: None
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Returns the axis and the shape of the scales in the verify graph, after ``change`` has
    changed the graph."""
    model = onnx.load(directory / "verify.onnx", load_external_data=False)
    change(model, directory)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    axes = {node.input[1]: next(a.i for a in node.attribute if a.name == "axis") for node in nodes}
    return {name: (axis, shapes[name]) for name, axis in axes.items()}


def test_manifest_records_the_plans(built: Path) -> None:
    manifest = load_manifest(built)
    assert manifest.plans.keys() == {"draft.onnx", "verify.onnx"}
    draft, verify = (manifest.plans[graph.file] for graph in manifest.graphs)
    assert draft.profiles == ((1, 1, 1),)
    most = manifest.max_tree_nodes + 1
    assert verify.profiles == ((1, most, most), (1, 256, 256)), (
        "every call of a round has M + 1 nodes"
    )
    for plan in manifest.plans.values():
        assert plan.size == (built / plan.file).stat().st_size > 10_000
        assert plan.sha256 == sha256_of(built / plan.file)
        assert plan.flavour == "tensorrt-rtx" and plan.version.split(".")[0].isdigit()
        assert plan.max_batch == 1
    files = {path.name for path in built.iterdir() if not is_build(path)}
    plans_of = {f"{name}.plan{suffix}" for name in ("draft", "verify") for suffix in ("", ".onnx")}
    assert files == {*manifest.files, "manifest.json", *plans_of}


def test_the_graph_that_the_builder_read_is_kept_beside_the_weights(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tools can build this graph unchanged. Its caches have a fixed length, and it uses the
    weights of the directory. With the inputs of ``examples/polygraphy`` it gives the results of the
    exported graph."""
    trt = pytest.importorskip("tensorrt_rtx")
    manifest = load_manifest(copy)
    for graph in manifest.graphs:
        path = copy / graph.file.replace(".onnx", ".plan.onnx")
        model = onnx.load(path, load_external_data=False)
        shapes = {
            one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim]
            for one in model.graph.input
        }
        assert (
            shapes["key_0"][2] == manifest.gpu_slots
            and path.stat().st_size < weight_bytes(manifest, graph) / 4
        )
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        assert trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR)).parse_from_file(str(path))
        assert plans.count_fused(trt, network)[1] == 2 * len(graph.caches)
        for name, value in {"MODEL": path, "FILLED": 20, "NODES": 3}.items():
            monkeypatch.setenv(name, str(value))
        (feed,) = run_path(str(FEED))["load_data"]()
        assert feed["key_0"][:, :, 19].any() and not feed["key_0"][:, :, 20:].any()
        found, expected = (
            InferenceSession(str(one)).run(None, feed) for one in (path, copy / graph.file)
        )
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    (copy / "verify.plan.onnx").unlink()
    assert (
        "draft.plan: up to date" in (shown := succeed(main, copy).stdout)
        and "verify.plan: up to date" not in shown
    )
    assert (copy / "verify.plan.onnx").exists()


def test_inspect_shows_plans(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(succeed(inspect.main, built, "--verify").stdout.split())
    assert "verify.plan" in shown and "tensorrt-rtx" in shown and "any supported GPU" in shown
    assert "3 attentions and 8 cache updates" in shown


def test_plans_that_are_up_to_date_are_not_built_again(copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.glob("*.plan")}
    assert succeed(main, copy).stdout == "draft.plan: up to date\nverify.plan: up to date\n"
    assert {path: path.stat().st_mtime_ns for path in copy.glob("*.plan")} == before
    assert "up to date" not in succeed(main, copy, "--force").stdout
    assert all(path.stat().st_mtime_ns > before[path] for path in before)


def test_outdated_and_missing_plans_are_built_again(copy: Path) -> None:
    assert "up to date" not in succeed(main, copy, "--prefill-chunk", 64).stdout
    assert load_manifest(copy).plans["verify.onnx"].profiles[1] == (1, 64, 64)
    (copy / "verify.plan").unlink()
    lines = succeed(main, copy, "--prefill-chunk", 64).stdout.splitlines()
    assert lines[0] == "draft.plan: up to date" and "MB by tensorrt-rtx" in lines[1]
    raw = json.loads((copy / "manifest.json").read_text())
    raw["plans"]["draft.onnx"]["source"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(raw))
    lines = succeed(main, copy, "--prefill-chunk", 64).stdout.splitlines()
    assert "MB by tensorrt-rtx" in lines[0] and lines[1] == "verify.plan: up to date"


def test_plans_without_weights_need_a_gpu(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the real builder writes plans with weights, even if plans without weights were
    requested."""
    assert_refused(
        run(main, copy, "--strip-weights"), "only where it finds a GPU", "leave --strip-weights out"
    )
    assert_refused(
        run(main, copy, "--target", "cpu", "--strip-weights"), "takes no option but --force"
    )
    monkeypatch.setattr(plans, "compute_capability", lambda: "8.9")
    assert_refused(run(main, copy, "--strip-weights"), "tensorrt-rtx cannot build", "CUDA_SUCCESS")


def test_the_source_of_plans_without_weights_is_recorded(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder, which has no GPU here, does not strip the plans. Stripped plans need little disk
    space."""
    options = plans.BuildOptions("tensorrt-rtx", 1, 256, (), strip_weights=True)
    original = plans._config

    def with_weights(*given: Any) -> Any:
        return original(
            *(replace(one, strip_weights=False) if one == options else one for one in given)
        )

    monkeypatch.setattr(plans, "_config", with_weights)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(plans, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 100_000_000)
    )
    succeed(main, copy, "--strip-weights")
    manifest = load_manifest(copy)
    for plan in manifest.plans.values():
        assert plan.refit == refit_digest(copy / f"{plan.file}.onnx", manifest) != ""
    assert "bytes without weights by" in " ".join(succeed(inspect.main, copy).stdout.split())
    assert (
        succeed(main, copy, "--strip-weights").stdout
        == "draft.plan: up to date\nverify.plan: up to date\n"
    )
    with (copy / "verify.plan.onnx").open("ab") as file:
        file.write(b"\0")
    lines = succeed(main, copy, "--strip-weights").stdout.splitlines()
    assert lines[0] == "draft.plan: up to date" and "MB by tensorrt-rtx" in lines[1]


def test_plans_record_batch_and_compute_capabilities(copy: Path) -> None:
    succeed(main, copy, "--batch", 4, "--compute-capability", "8.9", "--compute-capability", "12.0")
    for plan in load_manifest(copy).plans.values():
        assert plan.max_batch == 4 and plan.compute_capabilities == ("8.9", "12.0")


@pytest.mark.parametrize("batch", [1, 4])
def test_profiles_hold_a_rounds_nodes_of_each_row_and_a_piece_of_a_prompt(
    built: Path, batch: int
) -> None:
    """A draft step processes one node of each row. A prompt is prefilled alone."""
    manifest = load_manifest(built)
    options = plans.BuildOptions("tensorrt-rtx", batch, 128)
    slots = manifest.gpu_slots
    nodes = manifest.max_tree_nodes + 1
    geometry = manifest.geometry
    decoding, prefill = plans.profile_shapes(manifest, manifest.verify[0], options)
    (draft,) = plans.profile_shapes(manifest, manifest.draft, options)
    cache = (geometry.num_kv_heads, slots, geometry.head_dim)
    assert decoding["input_ids"] == [(1, 1), (batch, nodes), (batch, nodes)]
    assert draft["input_ids"] == [(1, 1), (batch, 1), (batch, 1)] and "logit_rows" not in draft
    assert decoding["attn_mask"] == [(1, 1, 1, slots), *[(batch, 1, nodes, slots)] * 2]
    assert decoding.get("write_indices") == ([(1,), (batch,), (batch,)] if batch > 1 else None)
    assert (
        decoding.get("key_0")
        == draft.get("key_0")
        == ([(1, *cache), *[(batch, *cache)] * 2] if batch > 1 else None)
    )
    assert prefill["input_ids"] == [(1, 1), (1, 128), (1, 128)] and prefill.get("key_0") in (
        [(1, *cache)] * 3,
        None,
    )
    assert decoding["logit_rows"] == [(1,), (nodes,), (nodes,)] and prefill["logit_rows"] == [
        (1,),
        (1,),
        (2,),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--precision", "bfloat16"), ("exported as float16", "--dtype bfloat16")),
        (
            ("--compute-capability", "9.0"),
            ("no kernels for compute capability 9.0", "7.5, 8.0", "--target tensorrt"),
        ),
        (("--compute-capability", "new"), ("no kernels for compute capability new",)),
        (("--prefill-chunk", 1024), ("--prefill-chunk 1024", "slots")),
        (("--target", "tensorrt"), ("tensorrt", "install")),
    ],
)
def test_unusable_options_are_refused(
    built: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_refused(run(main, built, *options), *words)


def test_plans_that_this_machines_gpu_cannot_run_are_not_built(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans are built if other GPUs are named."""
    monkeypatch.setattr(plans, "compute_capability", lambda: "9.0")
    assert_refused(
        run(main, built),
        "tensorrt-rtx",
        "no kernels for compute capability 9.0",
        "--target tensorrt",
    )
    options = plans.BuildOptions("tensorrt-rtx", 1, 128, ("8.9",))
    plans.check_options(load_manifest(built), options)
    monkeypatch.setattr(plans, "compute_capability", lambda: "8.9")
    plans.check_options(load_manifest(built), replace(options, compute_capabilities=()))


@pytest.mark.parametrize("options", [("bfloat16",), ("float16", "--quantize", "int4")])
def test_turing_has_no_bfloat16_and_no_int4(
    family_dir: Callable[[str], Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    directory = export_engine(family_dir("qwen2"), tmp_path / "plans", "--dtype", *options)
    result = run(main, directory, "--compute-capability", "7.5")
    assert_refused(
        result,
        f"no kernels for {options[-1]}",
        "on GPUs of compute capability 7.5",
        "--dtype float16",
    )


def test_attention_without_a_fused_kernel_is_built_from_parts(
    engine: Path, text_model: Path, tmp_path: Path
) -> None:
    """If heads have size 8, TensorRT has no fused attention for several nodes. For the draft's
    single node, it has a fused attention."""
    assert load_manifest(engine).geometry.head_dim == 8
    directory = export_engine(text_model, tmp_path / "plans", "--dtype", "float16")
    result = run(main, directory)
    assert result.exit_code == 0, result.stderr
    assert "float16 after about 1,000 tokens; export with --dtype bfloat16" in result.stderr
    assert (
        "verify.onnx: tensorrt-rtx has 0 of 3 attentions" in result.stderr
        and result.stderr.count("single kernels") == 1
    )
    manifest = load_manifest(directory)
    draft = manifest.plans["draft.onnx"]
    verify = manifest.plans["verify.onnx"]
    assert draft.fused_attentions > 0 and verify.fused_attentions == 0
    assert verify.fused_cache_updates == 2 * manifest.num_caches, (
        "the caches are still updated in place"
    )
    assert (
        f"{directory / 'verify.plan'}: up to date" not in result.stdout
        and "up to date" in succeed(main, directory).stdout
    )


def test_attention_with_capped_scores_is_refused(tmp_path: Path) -> None:
    sizes = GEOMETRY | {"head_dim": 16, "pad_token_id": None, "sliding_window": 64}
    model = FamilyCase("gemma2", sizes, 1).write(tmp_path / "model")
    directory = export_engine(
        model, tmp_path / "plans", "--exit-layer", 1, "--dtype", "bfloat16", "--max-seq-len", 256
    )
    assert_refused(
        run(main, directory), "no cap for scores", "Gemma2ForCausalLM", "--backend torch"
    )


def test_float32_directory_is_refused(engine: Path) -> None:
    assert_refused(run(main, engine), "float32", "--dtype float16")


def test_missing_tensorrt_is_reported(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plans, "FLAVOURS", {"tensorrt": "no_such_module", "tensorrt-rtx": "no_such_module"}
    )
    assert_refused(run(main, built), "No TensorRT is installed", "[tensorrt-rtx]'")


@pytest.mark.parametrize("damage", ["missing", "truncated", "edited"])
def test_damaged_plan_is_detected(copy: Path, damage: str) -> None:
    path = copy / "verify.plan"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(
            data[:1000] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1])
        )
    result = run(inspect.main, copy, "--verify")
    assert (
        result.exit_code == 2 and "verify.plan" in result.stderr and "eesd-build" in result.stderr
    )


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_modified_weights_are_refused(copy: Path, options: tuple[str, ...]) -> None:
    with (copy / "weights.bin").open("r+b") as file:
        file.write(b"\x01")
    assert_refused(run(main, copy, *options), "weights.bin was changed")


def test_files_are_hashed_only_before_a_build(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(build_cli, "verify_files", lambda directory, _: hashed.append(directory))
    succeed(main, copy)
    assert not hashed
    succeed(main, copy, "--force")
    assert hashed == [copy]


def test_failed_build_reports_the_builders_error_and_keeps_the_old_plans(copy: Path) -> None:
    model = onnx.load(copy / "draft.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "MatMul").op_type = "NoSuchOperator"
    onnx.save(model, copy / "draft.onnx")
    record(copy, "draft.onnx")
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    result = run(main, copy)
    assert_refused(result, "cannot build", "draft.onnx", "NoSuchOperator")
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()} == before


def test_too_little_memory_or_disk_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cli, "available_memory", lambda: 1000)
    assert_refused(run(main, copy, "--force"), "of memory", "--stages")
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    assert_refused(run(main, copy, "--force"), "GB free")


def test_full_disk_while_writing_keeps_the_old_plan(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No partial file remains."""
    names = sorted(path.name for path in copy.iterdir())
    original = Path.open

    def full(path: Path, *args: Any, **options: Any) -> Any:
        return original(
            Path("/dev/full")
            if path.name.startswith(".draft.plan.") and path.suffix == ".new"
            else path,
            *args,
            **options,
        )

    monkeypatch.setattr(Path, "open", full)
    result = run(main, copy, "--force")
    monkeypatch.undo()
    assert_refused(result, "No space left")
    assert sorted(path.name for path in copy.iterdir()) == names
    succeed(inspect.main, copy, "--verify")


def test_what_a_killed_build_left_is_removed(copy: Path, family_dir: Callable[[str], Path]) -> None:
    """The next build and the next export to the directory remove it."""
    before = listing(copy)
    for follow in (
        lambda: succeed(main, copy),
        lambda: export_engine(family_dir("qwen2"), copy, "--dtype", "float16"),
    ):
        kill_command(
            "eesd.export.build",
            "import eesd.export.plans as p; p._serialize = kill",
            copy,
            "--force",
        )
        assert len(listing(copy)) > len(before)
        follow()
        assert set(listing(copy)) <= set(before)
