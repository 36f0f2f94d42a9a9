"""Tests that ``eesd-inspect`` shows an engine directory and detects changed files. The output of
``--predict`` is compared with manual calculations and with docs/predict.md."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from support.bundled import EXAMPLE
from support.command import assert_one_line, assert_refused, export_engine, run, succeed
from support.engine_dirs import trained_head

from eesd.bench.replay.costs import COST_MODELS
from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.manifest import Manifest, load_manifest
from eesd.common.quantization import UNQUANTIZED, Quantization, Quantizations
from eesd.common.weights import ROTARY_TABLES, weights_of
from eesd.export import predict
from eesd.export.cli import main as export_main
from eesd.export.inspect import BAR_WIDTH, main, memory_bars
from eesd.export.memory import DeviceMemory, estimate_memory, format_bytes, slot_bytes
from eesd.export.outline import outlined
from eesd.export.predict import (
    GPUS,
    Hardware,
    Prediction,
    bytes_of_pass,
    call_seconds,
    operations_of_node,
)
from lab.lease.engines import llama, made_up


def words_of(output: str) -> set[str]:
    return set(output.replace("│", " ").replace(",", " ").split())


def test_summary_shows_geometry_exit_head_and_files(engine: Path) -> None:
    words = words_of(succeed(main, engine).stdout)
    assert {
        "model",
        "(LlamaForCausalLM)",
        "float32",
        "vocabulary",
        "97",
        "(untrained:",
        "slots",
        "512",
    } <= words
    assert {"draft.onnx", "verify.onnx", "weights.bin", "tokenizer.json"} <= words


def test_json_prints_the_manifest(engine: Path) -> None:
    assert succeed(main, engine, "--json").stdout == (engine / "manifest.json").read_text()


def test_verify_detects_a_changed_file(engine_copy: Path) -> None:
    assert succeed(main, engine_copy, "--verify").stdout.endswith("all files are as exported\n")
    result = succeed(main, engine_copy, "--verify", "--json")
    json.loads(result.stdout)
    assert result.stderr == "all files are as exported\n"
    weights = bytearray((engine_copy / "weights.bin").read_bytes())
    weights[100] ^= 1
    (engine_copy / "weights.bin").write_bytes(weights)
    result = run(main, engine_copy, "--verify")
    assert result.exit_code == 2 and "as exported" not in result.stdout
    assert_one_line(result.stderr, "weights.bin was changed")


def test_memory_has_a_bar_for_each_device(engine: Path) -> None:
    [device] = json.loads(succeed(main, engine, "--memory", "--json").stdout)["devices"]
    bar, legend = succeed(main, engine, "--memory").stdout.splitlines()[-2:]
    assert bar.startswith("device 0  █") and bar.endswith(" MB")
    assert legend.split() == ["█", "weights", "▓", "KV", "cache", "░", "buffers"]
    parts = {letter: bar.count(letter) / BAR_WIDTH for letter in "█▓░"}
    assert sum(parts.values()) == 1
    assert parts["▓"] == pytest.approx(device["kv_cache"] / device["total"], abs=1 / BAR_WIDTH)


def test_bars_have_one_scale_and_need_no_blocks() -> None:
    small = DeviceMemory(("a",), (0, 1), 10, 60, 10, 30, 5, 10, 0)
    large = replace(small, kv_cache=130)
    first, second, legend = memory_bars([small, large], 1, blocks=False)
    assert first.count("#") == second.count("#") == round(BAR_WIDTH * 60 / 200)
    assert first.count("=") == pytest.approx(BAR_WIDTH * 30 / 200, abs=1)
    assert legend.split()[:2] == ["#", "weights"]
    assert sum(map(second.count, "#=-")) == BAR_WIDTH


def test_other_directories_are_refused(tmp_path: Path) -> None:
    assert_refused(run(main, tmp_path), "has no manifest.json")
    assert_refused(run(main, tmp_path / "nowhere"), "is not a directory")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "--predict", "h200"], "--memory and --predict"),
        (["--threads", 2], "--threads are for --exact"),
        (["--backend", "torch"], "--threads are for --exact"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    engine: Path, options: list[object], words: str
) -> None:
    assert_refused(run(main, engine, *options), words)


def test_a_model_that_is_not_there_is_refused_before_imports() -> None:
    code = (
        "import sys; from eesd.export.inspect import main\n"
        "try: main()\n"
        "finally: print({'onnx', 'torch', 'eesd.export.outline'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, "--model", "TYPO", "--memory"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert_one_line(done.stderr, "TYPO is neither a directory")


PAGE = Path(__file__).parent.parent.parent / "docs" / "predict.md"
RANKS = PAGE.parent / "parallel.md"
LEASE = Path(__file__).parents[2] / "bench/results/lease-h200.jsonl"
SIMPLE = Hardware(
    "simple",
    1e9,
    1e12,
    1e9,
    attained=0.5,
    attained_operations=0.25,
    launch=1e-3,
    host=10.0,
    node=0.5,
)
INT4 = Quantization("int4", 32)


LLAMA_3_8B = llama(32, 4096, 14336, 32, 8, 128256)
QUARTER = ExitConfig(4, own_lm_head=True, draft_vocab=32064, deep=())
"""The configuration of a head that ``eesd-distill`` makes."""


def shaped(
    geometry: Geometry, exit_head: ExitConfig = QUARTER, quantization: Quantizations = UNQUANTIZED
) -> Manifest:
    """Returns the manifest of a bfloat16 model with 4096 slots."""
    return replace(made_up(geometry, exit_head, "bfloat16", 4096, 32), quantization=quantization)


def test_the_constants_give_the_times_that_the_h200_measured() -> None:
    """The test compares the times of whole passes, and the times of products with quantized
    weights. These products take longer than reading the weights."""
    lines = {
        line["step"]: line["found"] for line in map(json.loads, LEASE.read_text().splitlines())
    }
    measured = lines["passes of 4096 slots"]["graphs"]
    manifest = shaped(replace(LLAMA_3_8B, num_layers=8))
    found = predict.predict(manifest, GPUS["h200"], manifest.gpu_slots)
    calls = {"draft": found.draft} | {
        f"verify {nodes}": found.verify[nodes - 1] for nodes in (1, 2, 8, 33)
    }
    assert {name: 1e3 * seconds for name, seconds in calls.items()} == pytest.approx(
        {name: measured[name] for name in calls}, rel=0.065
    )
    for weights, kernels in (("int8", 8), ("int4", 4)):
        products = lines["quantized products"]["milliseconds of a block"]
        ratios = [products[weights][rows] / products["bfloat16"][rows] for rows in ("1", "33")]
        assert predict.LEVELS_TAKE[kernels] == pytest.approx(ratios, abs=0.006)
        quantized = shaped(LLAMA_3_8B, quantization=Quantizations(*[Quantization(weights, 32)] * 3))
        blocks = [
            predict.predict(m, GPUS["h200"], 4096).verify for m in (shaped(LLAMA_3_8B), quantized)
        ]
        assert [blocks[1][0] / blocks[0][0], blocks[1][32] / blocks[0][32]] == pytest.approx(
            ratios, abs=0.07
        )


def test_cost_models_of_gpus_are_predictions() -> None:
    large = llama(80, 8192, 28672, 64, 8, 128256)
    for name, geometry, draft in (
        ("8b", LLAMA_3_8B, None),
        ("8b-exported", LLAMA_3_8B, INT4),
        ("70b", large, INT4),
    ):
        found = predict.predict(
            shaped(geometry, quantization=Quantizations(draft=draft)), GPUS["h200"], 4096
        )
        costs = COST_MODELS[name]
        plain = found.verify[0]
        given = [costs.plain_seconds, costs.calls.draft_cost(1), costs.calls.verify_cost(33)]
        assert given == pytest.approx(
            [plain, found.draft / plain, found.verify[32] / plain], rel=2e-3
        )


@pytest.mark.parametrize(("own", "draft"), [(False, "none"), (False, "int4"), (True, "none")])
def test_a_draft_with_its_own_lm_head_reads_no_embedding_table(
    family_dir: Callable[[str], Path], tmp_path: Path, own: bool, draft: str
) -> None:
    """A tied embedding table is the LM head of the verify graph. It is also the LM head of the
    draft, unless the draft has a separate one, such as a 4-bit copy."""
    model = family_dir("llama-tied")
    head = trained_head(model, tmp_path / "head", 1, own)
    manifest = load_manifest(
        export_engine(model, tmp_path / "plans", "--exit-head", head, "--quantize-draft", draft)
    )
    geometry = manifest.geometry
    weights = weights_of(manifest, manifest.draft)
    stored = sum(weight.nbytes for name, weight in weights.items() if name not in ROTARY_TABLES)
    table = geometry.vocab_size * geometry.hidden_size * 4
    assert bytes_of_pass(manifest, manifest.draft, 0) == stored - (own or draft == "int4") * table


def test_a_call_takes_as_long_as_reading_or_computing_and_its_kernels(engine: Path) -> None:
    manifest = load_manifest(engine)
    graph = manifest.verify[0]
    layers = manifest.geometry.num_layers
    nbytes = bytes_of_pass(manifest, graph, 20)
    operations = operations_of_node(manifest, graph)
    others = (13 * layers + 27) * 1e-3 + 2 * layers * 0.5
    assert call_seconds(manifest, (graph,), SIMPLE, 20, 3) == pytest.approx(
        10 + nbytes / 0.5e9 + others
    )
    stages = predict.predict(replace(manifest, verify=(graph, graph)), SIMPLE, 20).verify[2]
    assert stages == pytest.approx(10 + 2 * (nbytes / 0.5e9 + others)), "the host waits once"
    slow = replace(SIMPLE, operations=1e6)
    assert call_seconds(manifest, (graph,), slow, 20, 3) == pytest.approx(
        10 + 3 * operations / 0.25e6 + others
    )
    drafting = (13 * (manifest.exit_head.layer + manifest.exit_head.blocks) + 27) * 1e-3
    reading = bytes_of_pass(manifest, manifest.draft, 20) / 0.5e9
    assert predict.predict(manifest, SIMPLE, 20).draft == pytest.approx(10 + reading + drafting)


def test_operations_are_two_for_each_weight_of_a_product(engine: Path) -> None:
    """The draft computes the products of its blocks and of the LM head. The embedding table is not
    one of them."""
    manifest = load_manifest(engine)
    geometry = manifest.geometry
    blocks = manifest.exit_head.layer + manifest.exit_head.blocks
    hidden = geometry.hidden_size
    heads = geometry.num_heads
    kv_heads = geometry.num_kv_heads
    block = (
        hidden * (2 * heads + 2 * kv_heads) * geometry.head_dim
        + 3 * hidden * geometry.intermediate_size
    )
    assert operations_of_node(manifest, manifest.draft) == 2 * (
        blocks * block + hidden * geometry.vocab_size
    )


def test_speed_up_is_tokens_over_cost() -> None:
    predicted = Prediction(1.0, (10.0, 10.0, 12.0, 40.0))
    assert predicted.speed_up(0.5, 2) == pytest.approx(1.75 * 10 / (2 + 12))
    assert predicted.speed_up(0.9, 0) == 1 and predicted.best_length(0.05) == 0
    assert predicted.best_length(0.9) == 2 and predicted.best_length(1.0) == 2


def test_inspect_prints_the_prediction(engine: Path) -> None:
    manifest = load_manifest(engine)
    shown = succeed(main, engine, "--predict", "h100").stdout
    assert (
        "H100 SXM" in shown
        and f"verify {manifest.max_tree_nodes + 1}" in shown
        and "tokens/s without drafts" in shown
    )
    found = json.loads(
        succeed(main, engine, "--predict", "l4", "--json", "--max-seq-len", 64).stdout
    )
    slots = replace(manifest, max_seq_len=64).gpu_slots
    assert slots > 64, (
        "a plan's caches have room for the padding of a round, and attention reads it"
    )
    expected = predict.predict(manifest, GPUS["l4"], slots)
    assert found == {"gpu": "l4", "slots": slots, "ranks": 1} | json.loads(
        json.dumps(expected.to_dict())
    )
    assert len(found["verify"]) == manifest.max_tree_nodes + 1


def test_a_short_text_is_read_in_fewer_slots(engine: Path) -> None:
    """Verify passes read fewer slots. The draft reads the whole cache of 4096 slots in place."""
    manifest = replace(load_manifest(engine), max_seq_len=4096)
    options = ("--predict", "l4", "--json", "--max-seq-len", 4096, "--text-tokens")
    most = manifest.gpu_slots // 64 * 16 - manifest.max_tree_nodes - 1
    for text, slots in ((most, 1024), (most + 1, 2064), (4096, manifest.gpu_slots)):
        found = json.loads(succeed(main, engine, *options, text).stdout)
        expected = predict.predict(load_manifest(engine), GPUS["l4"], slots, manifest.gpu_slots)
        assert found == {"gpu": "l4", "slots": slots, "ranks": 1} | json.loads(
            json.dumps(expected.to_dict())
        )
    assert_refused(run(main, engine, "--text-tokens", 5), "add --predict")
    assert_refused(run(main, engine, "--predict", "h100", "--batch", 2), "add --memory")


def test_a_model_is_predicted_before_its_export(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """The prediction needs only config.json. It uses the draft that the export would make, which is
    all layers in 4 bits or the model's own head."""
    model = family_dir("qwen2")
    plans = tmp_path / "plans"
    succeed(export_main, "--model", model, "--no-check", "-o", plans)
    (tmp_path / "config").mkdir()
    shutil.copy(model / "config.json", tmp_path / "config")
    for options in (("--predict", "h100", "--text-tokens", 9), ("--memory", "--batch", 2)):
        exported = json.loads(succeed(main, plans, *options, "--json").stdout)
        assert (
            json.loads(succeed(main, "--model", tmp_path / "config", *options, "--json").stdout)
            == exported
        )
    shown = succeed(main, "--model", tmp_path / "config", "--predict", "h100")
    assert "without plans and whole models" in shown.stdout and "% of verify 1)" in shown.stdout
    found = outlined(str(EXAMPLE / "model"))
    assert (found.exit_head.blocks, found.quantization.draft) == (
        1,
        None,
    ) and found.exit_head.trained
    assert_refused(
        run(main, "--model", tmp_path / "config"), "--model is for --predict and --memory"
    )
    assert_refused(
        run(main, plans, "--model", model, "--memory"), "either an engine directory or --model"
    )
    (tmp_path / "config/config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"dtype": "int8"})
    )
    assert_refused(run(main, "--model", tmp_path / "config", "--memory"), "config.json", "type")


def test_a_draft_that_reads_half_of_8_bits_is_predicted_so(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """The 8-bit levels are counted once (the draft reads 4 of the 8 bits), with their scales."""
    options = ("--exit-head", "quantized", "--dtype", "float32", "--quantize", "int8")
    manifest = load_manifest(export_engine(family_dir("qwen2"), tmp_path / "plans", *options))
    weights = {
        name: one for name, one in weights_of(manifest, manifest.draft).items() if one.quantization
    }
    verify, draft = (
        bytes_of_pass(manifest, graph, 0) for graph in (manifest.verify[0], manifest.draft)
    )
    assert verify - draft == sum(prod(one.shape) for one in weights.values()) // 2 > 0.3 * verify
    [device] = estimate_memory(manifest, 1)
    assert device.shared_weights > 0.9 * device.draft_weights


def test_a_directory_without_a_draft_is_predicted_with_drafts_of_the_text(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    plans = export_engine(family_dir("qwen2"), tmp_path / "plans", "--exit-head", "none")
    shown = succeed(main, plans, "--predict", "h100").stdout
    assert "draft step" not in shown and "of the text" in shown and "verify 33" in shown
    [device] = json.loads(succeed(main, plans, "--memory", "--json").stdout)["devices"]
    assert device["draft_weights"] == device["shared_weights"] == 0 and device["graphs"] == [
        "verify.onnx"
    ]
    assert "drafts come from the text alone" in succeed(main, plans).stdout


def test_a_model_that_does_not_fit_is_predicted_with_a_notice(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GPUS, "l4", replace(GPUS["l4"], memory=1e5))
    result = succeed(main, engine, "--predict", "l4")
    assert "L4 has 0.10 MB; split verify" in result.stderr and "draft step" in result.stdout
    assert not succeed(main, engine, "--predict", "h100").stderr


def test_ranks_share_bytes_and_add_twice_in_a_block(engine: Path) -> None:
    manifest = load_manifest(engine)
    graph = manifest.verify[0]
    geometry = manifest.geometry
    slots = 20
    block = (
        geometry.hidden_size
        * (2 * geometry.num_heads + 2 * geometry.num_kv_heads)
        * geometry.head_dim
    )
    block += 3 * geometry.hidden_size * geometry.intermediate_size
    split = 4 * geometry.num_layers * block + slots * slot_bytes(manifest, len(graph.caches))
    # The weights have 4 bits, and ranks dequantize them.
    levels = weights_of(manifest, graph)["exit_head.blocks.0.self_attn.kv_proj.weight"]
    kv = 4 * 2 * geometry.hidden_size * geometry.num_kv_heads * geometry.head_dim
    one, two = (bytes_of_pass(manifest, graph, slots, ranks) for ranks in (1, 2))
    assert one - two == split // 2 + levels.nbytes - kv // 2 and levels.nbytes < kv
    linked = replace(SIMPLE, link=1e6, gather=0.25)
    received = 2 * 3 * geometry.hidden_size * 4 / 0.5e6
    sums = 2 * geometry.num_layers * (0.25 + received + 2 * 1e-3)
    assert predict.sum_seconds(manifest, graph, linked, 3, 3) == pytest.approx(sums)
    found = call_seconds(manifest, (graph,), linked, slots, 3, 2) - predict.sum_seconds(
        manifest, graph, linked, 3, 2
    )
    others = (13 * geometry.num_layers + 27) * 1e-3 + 2 * geometry.num_layers * linked.node
    assert found == pytest.approx(10 + predict.TELLING + two / 0.5e9 + others)


def test_page_on_ranks_shows_predictions_and_memory() -> None:
    manifest = shaped(llama(80, 8192, 28672, 64, 8, 32000), ExitConfig(4))
    for ranks in (1, 2, 4, 8):
        memory = format_bytes(estimate_memory(manifest, 1, ranks)[0].total)
        found = predict.predict(manifest, GPUS["h100"], 4096, ranks=ranks)
        times = (
            f"{1e3 * seconds:.2f}" for seconds in (found.draft, found.verify[0], found.verify[32])
        )
        assert f"| {ranks} | {memory} | {' | '.join(times)} |\n" in RANKS.read_text()


def test_page_shows_the_predictions() -> None:
    """The page shows milliseconds, and the best speed-ups."""
    manifest = shaped(LLAMA_3_8B, ExitConfig(4))
    _, after = PAGE.read_text().split("## Other GPUs\n")
    table = [line for line in after.splitlines() if line.startswith("| ")][1:]
    for line, gpu in zip(table, GPUS.values(), strict=True):
        found = predict.predict(manifest, gpu, 4096)
        cells = [
            f"{1e3 * s:.2f}"
            for s in (found.draft, *(found.verify[nodes - 1] for nodes in (1, 5, 17, 33)))
        ]
        lengths = {acceptance: found.best_length(acceptance) for acceptance in (0.6, 0.7, 0.8, 0.9)}
        cells += [
            f"{found.speed_up(acceptance, length):.2f} ({length})"
            for acceptance, length in lengths.items()
        ]
        assert line == f"| {gpu.name} | {' | '.join(cells)} |"


def test_page_shows_the_predictions_beside_published_figures() -> None:
    """The 70B model of gpt-fast is Llama 2 70B."""
    large = llama(80, 8192, 28672, 64, 8, 32000)
    eight, four = (Quantizations(*[Quantization(bits, 32)] * 2) for bits in ("int8", "int4"))

    def plain(
        geometry: Geometry, gpu: str, bits: Quantizations = UNQUANTIZED, ranks: int = 1
    ) -> float:
        return (
            1e3
            * predict.predict(
                shaped(geometry, quantization=bits), GPUS[gpu], 4096, ranks=ranks
            ).verify[0]
        )

    times = [plain(LLAMA_3_8B, gpu) for gpu in ("h100", "h200", "rtx5090")]
    rows = [f"{time:.2f} ({1e3 / time:.0f})" for time in times]
    rows.append(", ".join(f"{plain(large, 'h100', ranks=ranks):.1f}" for ranks in (2, 8)))
    rows += [
        f"{plain(large, gpu, bits):.1f}"
        for gpu, bits in (("h100", eight), ("h200", eight), ("h100", four))
    ]
    table = PAGE.read_text().partition("## Published figures\n")[2].split("\n| ")[2:9]
    assert [line.split(" | ")[1] for line in table] == rows
