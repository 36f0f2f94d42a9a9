"""``eesd-inspect --memory``: its arithmetic against real graphs and KV caches, and the figures of docs/70b.md against it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.command import assert_refused, export_engine, run, succeed
from support.engine_dirs import assert_weights, trained_head
from support.synthetic import LLAMA_70B, write_checkpoint

from eesd.common.geometry import ExitConfig
from eesd.common.manifest import PREFILL_CHUNK, WEIGHTS, FileInfo, Manifest, load_manifest
from eesd.export import engine_dir, memory
from eesd.export.cli import main as export_main
from eesd.export.graph import ExportOptions
from eesd.export.inspect import main as inspect_main
from eesd.export.stages import split_layers
from eesd.export.weights import WeightLayout
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.kv_cache import HostKVCache

PAGE = Path(__file__).parent.parent / "docs" / "70b.md"
EXPORT_70B = ("--exit-layer", 4, "--stages", 2, "--dtype", "float16", "--max-seq-len", 4096, "--no-check")


def planned(directory: Path, *options: object) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(succeed(inspect_main, directory, "--memory", "--json", *options).stdout)
    return plan


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama-tied", ("--stages", 3, "--dtype", "bfloat16")),
        ("llama-bias", ("--stages", 2)),
        ("qwen3", ()),
        ("mistral", ("--max-seq-len", 40, "--stages", 2)),
    ],
)
def test_weights(family_dir: Callable[[str], Path], tmp_path: Path, family: str, options: tuple[object, ...]) -> None:
    assert_weights(export_engine(family_dir(family), tmp_path / "plans", *options))


@pytest.mark.parametrize(("blocks", "own_lm_head", "stages"), [(1, True, 1), (2, False, 2), (3, True, 3)])
def test_weights_of_trained_heads(
    family_dir: Callable[[str], Path], tmp_path: Path, blocks: int, own_lm_head: bool, stages: int
) -> None:
    model = family_dir("qwen3-bias")
    head = trained_head(model, tmp_path / "head", blocks, own_lm_head)
    assert_weights(export_engine(model, tmp_path / "plans", "--exit-head", head, "--stages", stages))


@pytest.fixture(scope="module")
def staged(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text model in two stages."""
    return export_engine(text_model, tmp_path_factory.mktemp("staged") / "plans", "--stages", 2, "--max-seq-len", 128)


def test_slab(staged: Path) -> None:
    manifest = load_manifest(staged)
    kv_cache = HostKVCache(manifest, manifest.max_seq_len).data
    devices = planned(staged)["devices"]
    assert sum(device["kv_cache"] for device in devices) == kv_cache.nbytes
    assert [device["kv_cache"] * 4 // kv_cache.nbytes for device in devices] == [len(s.caches) for s in manifest.verify]
    assert sum(device["kv_cache"] for device in planned(staged, "--batch", 3)["devices"]) == 3 * kv_cache.nbytes


def test_buffers(staged: Path) -> None:
    """At least what is bound for a call: the mask, the hidden state that crosses, the logits."""
    manifest, (first, second) = load_manifest(staged), planned(staged)["devices"]
    for key, tokens in (("round_buffers", manifest.max_tree_nodes + 1), ("prefill_buffers", PREFILL_CHUNK)):
        bound = tokens * (manifest.max_seq_len + manifest.geometry.hidden_size) * 4
        assert bound < first[key] < 20 * bound and bound + tokens * manifest.geometry.vocab_size * 4 < second[key] < 20 * bound
    weights = first["draft_weights"] + first["verify_weights"] - first["shared_weights"]
    assert first["total"] == weights + first["kv_cache"] + max(first["round_buffers"], first["prefill_buffers"])


def test_another_length(staged: Path, text_model: Path, tmp_path: Path) -> None:
    """The plan for more slots is that of an export with so many."""
    longer = export_engine(text_model, tmp_path / "plans", "--stages", 2, "--max-seq-len", 500)
    assert planned(staged, "--max-seq-len", 500) == planned(longer) != planned(staged)


def test_table(staged: Path) -> None:
    shown = succeed(inspect_main, staged, "--memory", "--batch", 2).stdout
    for words in ("device 1", "verify_1.onnx", "128 slots x 2", "33 nodes", "prefill of 128", "total", "MB"):
        assert words in shown


def test_refused(staged: Path) -> None:
    for option in (("--max-seq-len", 100), ("--batch", 2)):
        assert_refused(run(inspect_main, staged, *option), "add --memory")
    assert_refused(run(inspect_main, staged, "--memory", "--max-seq-len", 32), "32 nodes of a round")


@pytest.fixture(scope="module")
def checkpoint_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 2 70B's geometry in 15 shards with nothing in them."""
    return write_checkpoint(tmp_path_factory.mktemp("large") / "llama-70b", LLAMA_70B, shards=15, sparse=True)


def page(command: str) -> str:
    """What docs/70b.md shows of a command."""
    _, found = PAGE.read_text().split(f"    $ {command}\n")
    lines = found.split("\n\n    $")[0].split("\n\n")[0].splitlines()
    return "\n".join(line.removeprefix("    ").rstrip() for line in lines)


def rendered(manifest: Manifest) -> str:
    console = Console(width=80, file=StringIO())
    console.print(memory.table(manifest, memory.estimate_memory(manifest, 1), 1))
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def manifest_70b(checkpoint: Checkpoint, small: Manifest, options: ExportOptions) -> Manifest:
    """A manifest of that geometry, split as an export would, made of the one of a small model in two stages."""
    geometry, stages = checkpoint.geometry, split_layers(checkpoint, ExitConfig(4), options)
    caches = [tuple(layers) for layers in stages]
    caches[0] += (geometry.num_layers,)
    files = [stage.file for stage in small.verify] if len(stages) > 1 else ["verify.onnx"]
    return replace(
        small,
        geometry=geometry,
        exit_head=ExitConfig(4),
        dtype=options.dtype,
        quantization=options.quantization,
        max_seq_len=options.max_seq_len,
        draft=replace(small.draft, caches=(*range(4), geometry.num_layers)),
        verify=tuple(
            replace(stage, file=file, caches=own) for stage, file, own in zip(small.verify, files, caches, strict=False)
        ),
    )


def test_page_on_70b(checkpoint_70b: Path, staged: Path) -> None:
    """The plans for two devices and, in int4, for one are the page's."""
    checkpoint, small = Checkpoint(checkpoint_70b), load_manifest(staged)
    int4 = manifest_70b(checkpoint, small, ExportOptions("float16", 4096, 32, 8, quantize="int4"))
    assert rendered(int4) == page("eesd-inspect plans-int4/ --memory")
    manifest = manifest_70b(checkpoint, small, ExportOptions("float16", 4096, 32, 8, stages=2))
    assert rendered(manifest) == page("eesd-inspect plans/ --memory")
    for figure in (
        f"{memory.slot_bytes(manifest, 81):,} bytes",
        own_copies(manifest, max),
        f"{checkpoint.geometry.hidden_size * 2 / 1e3:.0f} KB",
    ):
        assert figure in PAGE.read_text()
    assert own_copies(replace(manifest, dtype="float32"), sum) in PAGE.read_text()


def own_copies(manifest: Manifest, over_devices: Callable[[list[int]], int]) -> str:
    """What the devices hold where the draft has weights of its own."""
    devices = memory.estimate_memory(manifest, 1)
    return memory.size(over_devices([device.total + device.shared_weights for device in devices]))


@pytest.mark.slow
def test_export_of_70b(checkpoint_70b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole export but for the bytes of weights.bin, a file of holes here: sizes and plan are the page's."""

    def holes(path: Path, plan: WeightLayout, *_: object) -> FileInfo:
        with path.open("wb") as file:
            file.truncate(plan.size)
        return FileInfo(plan.size, "")

    monkeypatch.setattr(engine_dir, "write_weights", holes)
    monkeypatch.setattr(engine_dir, "check_space", lambda *_: None)
    directory = tmp_path / "plans"
    succeed(export_main, "--model", checkpoint_70b, "-o", directory, *EXPORT_70B)
    shown = succeed(inspect_main, directory, "--memory").stdout
    assert "\n".join(line.rstrip() for line in shown.splitlines()) == page("eesd-inspect plans/ --memory")
    files = {**load_manifest(directory).files, "model": FileInfo(sum(f.stat().st_size for f in checkpoint_70b.iterdir()), "")}
    rows = dict(re.findall(r"^\| `([^`]+)`.*\| ([\d.]+ [GM]B) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {name: memory.size(files[name].size) for name in rows} and WEIGHTS in rows and "model" in rows
