"""Tests of ``eesd-export --link-weights``. Engines that read the checkpoint's files give the same
results as engines with a copy of the weights."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import ExternalDataInfo
from support.command import (
    assert_one_line,
    assert_refused,
    export_engine,
    exported_files,
    listing,
    run,
    slow_but,
    succeed,
)
from support.engine_dirs import logits_of, trained_head
from support.synthetic import LLAMA_70B, write_checkpoint

import eesd
from eesd.common.errors import EESDError
from eesd.common.integrity import verify_files
from eesd.common.manifest import WEIGHTS_FILE, load_manifest
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime.llm import Speculation

FamilyDir = Callable[[str], Path]

PROMPT = [1, 17, 5, 40, 3, 88, 61]
SHARDED = "codellama"  # has float32 weights in several files


@pytest.fixture(scope="module")
def pair(family_dir: FamilyDir, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns two engine directories. The first has a copy of the weights, and the second has links
    to them. Tests must not change them."""
    parent = tmp_path_factory.mktemp("linked")
    model = family_dir(SHARDED)
    return export_engine(model, parent / "copied", "--quantize-draft", "none"), export_engine(
        model, parent / "linked", "--link-weights"
    )


@pytest.fixture
def linked(family_dir: FamilyDir, tmp_path: Path) -> Path:
    """A linked export that the test may damage. The checkpoint is the directory ``model`` next to
    it."""
    model = shutil.copytree(family_dir(SHARDED), tmp_path / "model")
    return export_engine(model, tmp_path / "plans", "--link-weights")


def locations(directory: Path, graph: str = "verify.onnx") -> dict[str, str]:
    """Returns the file that contains each weight."""
    tensors = onnx.load(directory / graph, load_external_data=False).graph.initializer
    return {
        tensor.name: ExternalDataInfo(tensor).location for tensor in tensors if tensor.external_data
    }


def shard(directory: Path) -> Path:
    return directory / sorted(load_manifest(directory).linked)[1]


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_linked_export_copies_only_the_rotary_tables(
    pair: tuple[Path, Path], family_dir: FamilyDir
) -> None:
    directory = pair[1]
    model = family_dir(SHARDED)
    manifest = load_manifest(directory)
    assert len(manifest.linked) > 2
    for name, info in manifest.linked.items():
        assert (directory / name).samefile(model / name) and info.size == (
            model / name
        ).stat().st_size
    assert {name for name, file in locations(directory).items() if file == WEIGHTS_FILE} == {
        "cos",
        "sin",
    }
    assert set(locations(directory, "draft.onnx").values()) <= {WEIGHTS_FILE, *manifest.linked}
    verify_files(directory, manifest)
    assert sorted(exported_files(directory)) == sorted(["manifest.json", *manifest.sizes])


@pytest.mark.parametrize(("backend", "tolerance"), [("ort", 0.0), ("torch", 1e-4)])
def test_backends_compute_the_same_with_links(
    pair: tuple[Path, Path], backend: str, tolerance: float
) -> None:
    copied, linked = pair
    for expected, found in zip(logits_of(copied, "ort"), logits_of(linked, backend), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    speculation = Speculation("fixed:k=3", guard=False)
    tokens = [
        eesd.load(one, backend, speculation=speculation).generate(PROMPT, max_new_tokens=40).tokens
        for one in pair
    ]
    assert tokens[0] == tokens[1]


def test_a_draft_of_all_layers_is_copied_beside_linked_weights(
    pair: tuple[Path, Path], family_dir: FamilyDir, tmp_path: Path
) -> None:
    """The draft's levels are in weights.bin, and the verify graph reads the checkpoint's files. The
    tokens equal the tokens of plain decoding."""
    directory = export_engine(
        family_dir(SHARDED), tmp_path / "plans", "--exit-head", "quantized", "--link-weights"
    )
    files = locations(directory, "draft.onnx")
    found = locations(directory)
    assert {name for name, file in found.items() if file == WEIGHTS_FILE} == {"cos", "sin"}
    copies = {name for name in files if name.startswith("draft.")}
    assert len(copies) > 30 and {files[name] for name in copies} == {WEIGHTS_FILE}
    expected = eesd.load(pair[0], "ort", speculation=None).generate(
        PROMPT, max_new_tokens=40, ignore_eos=True
    )
    for backend in ("ort", "torch"):
        llm = eesd.load(
            directory, backend, speculation=Speculation("fixed:k=3", guard=False, drafter="exit")
        )
        made = llm.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
        assert made.tokens == expected.tokens and made.stats.accepted_tokens > 5


@pytest.mark.parametrize("family", slow_but(["llama-tied", "qwen2", "qwen3-bias"], "llama-tied"))
def test_linked_graphs_of_other_families_pass_the_parity_check(
    family_dir: FamilyDir, tmp_path: Path, family: str
) -> None:
    """The families have tied embeddings and biases."""
    directory = export_engine(
        family_dir(family), tmp_path / "plans", "--link-weights", "--check", "--stages", 2
    )
    assert np.allclose(logits_of(directory, "ort")[0], logits_of(directory, "torch")[0], atol=1e-4)


def test_exit_head_of_another_type_is_copied(tmp_path: Path) -> None:
    """The float16 base model is linked. The float32 tensors of the head are cast and written to
    weights.bin."""
    size = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
    }
    model = write_checkpoint(
        tmp_path / "model", LLAMA_70B | size | {"num_hidden_layers": 3}, shards=2, sparse=False
    )
    head = trained_head(model, tmp_path / "head", blocks=1, own_lm_head=False)
    directory = export_engine(
        model, tmp_path / "plans", "--exit-head", head, "--link-weights", "--check"
    )
    files = locations(directory, "draft.onnx")
    copied = {name for name, file in files.items() if file == WEIGHTS_FILE}
    assert copied == {name for name in files if name.startswith("exit_head.")} | {"cos", "sin"}


def test_unaligned_tensors_are_copied(
    pair: tuple[Path, Path], family_dir: FamilyDir, tmp_path: Path
) -> None:
    """torch cannot map unaligned tensors. One more byte in the header moves all tensors of a
    file."""
    model = shutil.copytree(family_dir(SHARDED), tmp_path / "model")
    path = model / sorted(load_manifest(pair[1]).linked)[0]
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (header + 1).to_bytes(8, "little") + data[8 : 8 + header] + b" " + data[8 + header :]
    )
    directory = export_engine(model, tmp_path / "plans", "--link-weights")
    assert path.name not in load_manifest(directory).linked
    assert np.array_equal(logits_of(directory, "ort")[0], logits_of(pair[0], "ort")[0])
    assert np.allclose(logits_of(directory, "torch")[0], logits_of(pair[0], "ort")[0], atol=1e-4)


def test_symbolic_links_of_a_hub_cache_are_followed(family_dir: FamilyDir, tmp_path: Path) -> None:
    """Snapshots in the cache hold symbolic links to files with other names."""
    snapshot = tmp_path / "snapshot"
    blobs = shutil.copytree(family_dir(SHARDED), tmp_path / "blobs")
    snapshot.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        blob = path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / blob.name)
    directory = export_engine(snapshot, tmp_path / "plans", "--link-weights")
    assert not any(path.is_symlink() for path in directory.iterdir())
    shutil.rmtree(blobs)
    assert logits_of(directory, "ort")


def test_linked_export_survives_a_replaced_checkpoint(
    linked: Path, pair: tuple[Path, Path]
) -> None:
    model = linked.parent / "model"
    for path in model.glob("*.safetensors"):
        path.unlink()
        path.write_bytes(b"another model")
    shutil.rmtree(model)
    succeed(inspect_main, linked, "--verify")
    assert np.array_equal(logits_of(linked, "ort")[0], logits_of(pair[0], "ort")[0])


def test_checkpoint_modified_in_place_is_detected(linked: Path) -> None:
    succeed(inspect_main, linked, "--verify")
    flip(linked.parent / "model" / shard(linked).name)
    result = run(inspect_main, linked, "--verify")
    assert result.exit_code == 2
    assert_one_line(
        result.stderr,
        shard(linked).name,
        "the checkpoint's own file",
        "was changed after the export",
    )


def test_other_weights_with_the_old_modification_time_are_detected(linked: Path) -> None:
    """The hash of the samples differs."""
    path = shard(linked)
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(inspect_main, linked, "--verify").exit_code == 2


def test_truncated_and_missing_shards_are_refused(linked: Path) -> None:
    path = shard(linked)
    os.truncate(path, 100)
    with pytest.raises(EESDError, match=rf"{path.name} has 100 bytes"):
        load_manifest(linked)
    path.unlink()
    with pytest.raises(EESDError, match=rf"{path.name} is missing"):
        load_manifest(linked)


def test_checkpoint_on_another_file_system_is_refused(
    family_dir: FamilyDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    arguments = (
        "--model",
        family_dir(SHARDED),
        "-o",
        tmp_path / "plans",
        "--exit-layer",
        1,
        "--link-weights",
    )
    assert_refused(
        run(export_main, *arguments),
        "cannot be linked into",
        "cross-device",
        "--output beside the checkpoint",
    )
    assert listing(tmp_path) == []


def test_linking_weights_that_need_a_cast_is_refused(family_dir: FamilyDir, tmp_path: Path) -> None:
    arguments = (
        "--model",
        family_dir("llama2"),
        "-o",
        tmp_path / "plans",
        "--exit-layer",
        1,
        "--link-weights",
    )
    assert_refused(
        run(export_main, *arguments, "--dtype", "float32"),
        "--link-weights",
        "float32",
        "float16",
        "--dtype",
    )


def test_linked_export_is_replaced_unless_it_holds_other_files(linked: Path) -> None:
    """The checkpoint stays as it is."""
    model = linked.parent / "model"
    before = {path: path.stat().st_size for path in model.iterdir()}
    (linked / "exit_head.safetensors").write_bytes(b"trained for days")
    arguments = ("--model", model, "-o", linked, "--exit-layer", 1, "--no-check")
    assert_refused(run(export_main, *arguments), "also holds exit_head.safetensors")
    (linked / "exit_head.safetensors").unlink()
    succeed(export_main, *arguments)
    assert not load_manifest(linked).linked and not list(linked.glob("*.safetensors"))
    assert {path: path.stat().st_size for path in model.iterdir()} == before


@pytest.mark.slow
def test_plans_of_copied_and_linked_weights_are_alike(
    family_dir: FamilyDir, tmp_path: Path
) -> None:
    """Plans of both kinds have almost the same size, and the same fused kernels."""
    pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")
    from eesd.export.build import main as build_main

    plans = []
    for name, option in (("copied", ()), ("linked", ("--link-weights",))):
        directory = export_engine(
            family_dir("llama2"), tmp_path / name, "--dtype", "float16", *option
        )
        succeed(build_main, directory)
        plans.append(load_manifest(directory).plans["verify.onnx"])
    assert abs(plans[0].size - plans[1].size) < 8192
    assert plans[0].fused_attentions == plans[1].fused_attentions == 3
    flip(shard_of_one := directory / next(iter(load_manifest(directory).linked)))
    assert_refused(run(build_main, directory, "--force"), shard_of_one.name, "was changed")


@pytest.mark.slow
def test_linked_export_of_a_70b_model_copies_10_mb(tmp_path: Path) -> None:
    """The 15 shards are sparse files."""
    model = write_checkpoint(tmp_path / "70b", LLAMA_70B, shards=15, sparse=True)
    directory = tmp_path / "plans"
    succeed(
        export_main,
        "--model",
        model,
        "--exit-layer",
        4,
        "--stages",
        2,
        "--link-weights",
        "-o",
        directory,
    )
    manifest = load_manifest(directory)
    assert len(manifest.linked) == 15 and sum(manifest.sizes.values()) > 137 * 10**9
    assert sum(info.size for info in manifest.files.values()) < 10**7
    succeed(inspect_main, directory, "--verify")
