"""Tests that ``eesd-inspect --memory`` agrees with real graphs and KV caches, and that docs/70b.md
shows its output."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.command import assert_refused, export_engine, run, slow_but, succeed
from support.engine_dirs import assert_weights_match_manifest, trained_head
from support.synthetic import LLAMA_70B, write_checkpoint

from eesd.common.geometry import ExitConfig
from eesd.common.manifest import WEIGHTS_FILE, FileInfo, Manifest, load_manifest
from eesd.common.quantization import BLOCK, Quantization, Quantizations
from eesd.export import engine_dir
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.export.inspect import memory_table
from eesd.export.memory import estimate_memory, format_bytes, slot_bytes
from eesd.export.weights import WeightLayout
from eesd.runtime.engines.kv_cache import HostKVCache
from lab.lease.engines import llama, made_up

PAGE = Path(__file__).parent.parent.parent / "docs" / "70b.md"
EXPORT_70B = (
    "--exit-layer",
    4,
    "--stages",
    2,
    "--dtype",
    "float16",
    "--max-seq-len",
    4096,
    "--no-check",
)


def estimated(directory: Path, *options: object) -> dict[str, Any]:
    estimate: dict[str, Any] = json.loads(
        succeed(inspect_main, directory, "--memory", "--json", *options).stdout
    )
    return estimate


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama-tied", ("--stages", 3, "--dtype", "bfloat16"), marks=pytest.mark.slow),
        ("qwen2", ("--exit-head", "quantized", "--dtype", "float16")),
        pytest.param("llama-bias", ("--stages", 2), marks=pytest.mark.slow),
        pytest.param("qwen3", (), marks=pytest.mark.slow),
        pytest.param("mistral", ("--max-seq-len", 40, "--stages", 2), marks=pytest.mark.slow),
    ],
)
def test_manifest_counts_the_bytes_of_weights(
    family_dir: Callable[[str], Path], tmp_path: Path, family: str, options: tuple[object, ...]
) -> None:
    assert_weights_match_manifest(export_engine(family_dir(family), tmp_path / "plans", *options))


@pytest.mark.parametrize(
    ("blocks", "own_lm_head", "stages"),
    slow_but([(1, True, 1), (2, False, 2), (3, True, 3)], (3, True, 3)),
)
def test_manifest_counts_the_bytes_of_trained_heads(
    family_dir: Callable[[str], Path], tmp_path: Path, blocks: int, own_lm_head: bool, stages: int
) -> None:
    model = family_dir("qwen3-bias")
    head = trained_head(model, tmp_path / "head", blocks, own_lm_head)
    assert_weights_match_manifest(
        export_engine(model, tmp_path / "plans", "--exit-head", head, "--stages", stages)
    )


@pytest.fixture(scope="module")
def staged(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text model in two stages."""
    return export_engine(
        text_model, tmp_path_factory.mktemp("staged") / "plans", "--stages", 2, "--max-seq-len", 128
    )


def test_kv_cache_has_the_size_of_the_runtimes_cache(staged: Path) -> None:
    manifest = load_manifest(staged)
    kv_cache = HostKVCache(manifest, manifest.max_seq_len).data
    devices = estimated(staged)["devices"]
    assert sum(device["kv_cache"] for device in devices) == kv_cache.nbytes
    assert [device["kv_cache"] * 4 // kv_cache.nbytes for device in devices] == [
        len(s.caches) for s in manifest.verify
    ]
    assert (
        sum(device["kv_cache"] for device in estimated(staged, "--batch", 3)["devices"])
        == 3 * kv_cache.nbytes
    )


def test_buffers_hold_mask_hidden_state_and_logits(staged: Path) -> None:
    manifest = load_manifest(staged)
    first, second = estimated(staged)["devices"]
    nodes = manifest.max_tree_nodes + 1
    vocab_size = manifest.geometry.vocab_size
    for key, tokens, rows in (
        ("round_buffers", nodes, nodes),
        ("prefill_buffers", manifest.gpu_prefill_chunk, 1),
    ):
        bound = tokens * (manifest.max_seq_len + manifest.geometry.hidden_size) * 4
        assert (
            bound < first[key] < 20 * bound
            and bound + rows * vocab_size * 4 < second[key] < 20 * bound
        )
    weights = first["draft_weights"] + first["verify_weights"] - first["shared_weights"]
    assert first["total"] == weights + first["kv_cache"] + max(
        first["round_buffers"], first["prefill_buffers"]
    )


def test_rows_take_caches_and_rounds_and_are_prefilled_alone(staged: Path) -> None:
    for one, three in zip(
        estimated(staged)["devices"], estimated(staged, "--batch", 3)["devices"], strict=True
    ):
        assert (
            three["round_buffers"] == 3 * one["round_buffers"]
            and three["kv_cache"] == 3 * one["kv_cache"]
        )
        assert (
            three["prefill_buffers"] == one["prefill_buffers"]
            and three["verify_weights"] == one["verify_weights"]
        )


def test_estimate_for_another_length_is_that_of_an_export_with_it(
    staged: Path, text_model: Path, tmp_path: Path
) -> None:
    longer = export_engine(text_model, tmp_path / "plans", "--stages", 2, "--max-seq-len", 500)
    assert estimated(staged, "--max-seq-len", 500) == estimated(longer) != estimated(staged)


def test_table_has_a_column_for_each_device(staged: Path) -> None:
    shown = succeed(inspect_main, staged, "--memory", "--batch", 2).stdout
    for words in (
        "device 1",
        "verify_1.onnx",
        "128 slots x 2",
        "33 nodes",
        "prefill of 128",
        "total",
        "MB",
    ):
        assert words in shown


def test_options_without_memory_and_too_few_slots_are_refused(staged: Path) -> None:
    for option in (("--max-seq-len", 100), ("--batch", 2)):
        assert_refused(run(inspect_main, staged, *option), "add --memory")
    assert_refused(
        run(inspect_main, staged, "--memory", "--max-seq-len", 32), "32 nodes of a round"
    )


@pytest.fixture(scope="module")
def checkpoint_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the geometry of Llama 2 70B. It consists of 15 sparse shards."""
    return write_checkpoint(
        tmp_path_factory.mktemp("large") / "llama-70b", LLAMA_70B, shards=15, sparse=True
    )


def page(command: str) -> str:
    """Returns the output of a command that docs/70b.md shows."""
    _, found = PAGE.read_text().split(f"    $ {command}\n")
    shown = takewhile(lambda line: not line or line.startswith("    "), found.splitlines())
    block = "\n".join(line.removeprefix("    ").rstrip() for line in shown)
    return block.partition("\n\n$")[0].rstrip()


def rendered(manifest: Manifest) -> str:
    console = Console(width=80, file=StringIO())
    console.print(memory_table(manifest, estimate_memory(manifest, 1), 1))
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_page_on_70b_shows_the_estimates_of_one_device_in_int4() -> None:
    manifest = made_up(llama(80, 8192, 28672, 64, 8, 32000), ExitConfig(4), "float16", 4096, 32)
    levels = Quantization("int4", BLOCK)
    assert rendered(replace(manifest, quantization=Quantizations(levels, levels, levels))) == page(
        "eesd-inspect plans-int4/ --memory"
    )


def total_without_sharing(manifest: Manifest, over_devices: Callable[[list[int]], int]) -> str:
    """Returns the memory over all devices if the draft had its own copy of the weights."""
    devices = estimate_memory(manifest, 1)
    return format_bytes(over_devices([device.total + device.shared_weights for device in devices]))


@pytest.mark.slow
def test_page_on_70b_shows_the_sizes_of_an_export(
    checkpoint_70b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is complete, except that weights.bin is a sparse file."""

    def write_sparse(path: Path, layout: WeightLayout, *_: object) -> FileInfo:
        with path.open("wb") as file:
            file.truncate(layout.size)
        return FileInfo(layout.size, "")

    monkeypatch.setattr(engine_dir, "write_weights", write_sparse)
    monkeypatch.setattr(engine_dir, "check_space", lambda *_: None)
    directory = tmp_path / "plans"
    succeed(export_main, "--model", checkpoint_70b, "-o", directory, *EXPORT_70B)
    shown = succeed(inspect_main, directory, "--memory").stdout
    assert "\n".join(line.rstrip() for line in shown.splitlines()) == page(
        "eesd-inspect plans/ --memory"
    )
    manifest = load_manifest(directory)
    for figure in (
        f"{slot_bytes(manifest, 81):,} bytes",
        f"{manifest.geometry.hidden_size * 2 / 1e3:.0f} KB",
    ):
        assert figure in PAGE.read_text()
    for dtype, over_devices in (("float16", max), ("float32", sum)):
        assert (
            total_without_sharing(replace(manifest, dtype=dtype), over_devices) in PAGE.read_text()
        )
    files = {
        **manifest.files,
        "model": FileInfo(sum(f.stat().st_size for f in checkpoint_70b.iterdir()), ""),
    }
    rows = dict(re.findall(r"^\| `([^`]+)`.*\| ([\d.]+ [GM]B) \|$", PAGE.read_text(), re.MULTILINE))
    assert (
        rows == {name: format_bytes(files[name].size) for name in rows}
        and WEIGHTS_FILE in rows
        and "model" in rows
    )
