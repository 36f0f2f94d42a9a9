"""Exit heads are stored and loaded; damaged heads and heads of other models are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import FAMILIES, build, randomise

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig
from eesd.common.prior import CalibrationPrior
from eesd.model import exit_head_file
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import ExitHead
from eesd.model.loading import load_decoder, load_exit_head, make_initial_head, save_exit_head

FamilyDir = Callable[[str], Path]


def make_head(checkpoint: Checkpoint, blocks: int = 1, own_lm_head: bool = False) -> ExitHead:
    config = ExitConfig(2, blocks, own_lm_head, checkpoint.fingerprint(), trained=True)
    head = make_initial_head(checkpoint, config)
    randomise(head, seed=3)
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("blocks", "own_lm_head"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("family", ["llama-bias", "qwen3"])
def test_loaded_head_is_the_saved_head(
    family_dir: FamilyDir,
    tmp_path: Path,
    family: str,
    blocks: int,
    own_lm_head: bool,
    dtype: torch.dtype,
) -> None:
    checkpoint = Checkpoint(family_dir(family))
    head = make_head(checkpoint, blocks, own_lm_head)
    save_exit_head(head, tmp_path / "new" / "head", dtype)
    read = load_exit_head(checkpoint, tmp_path / "new" / "head")
    assert read.exit_config == head.exit_config
    expected = {name: value.to(dtype).float() for name, value in head.state_dict().items()}
    assert ("lm_head.weight" in expected) == own_lm_head
    torch.testing.assert_close(read.state_dict(), expected, rtol=0, atol=0)


def test_saving_again_replaces_the_head(family_dir: FamilyDir, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family_dir("mistral"))
    save_exit_head(make_head(checkpoint, blocks=2), tmp_path)
    save_exit_head(make_head(checkpoint, blocks=1, own_lm_head=True), tmp_path)
    assert load_exit_head(checkpoint, tmp_path).exit_config.blocks == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        exit_head_file.CONFIG_FILE,
        exit_head_file.WEIGHTS_FILE,
    ]


@pytest.mark.parametrize("own_lm_head", [False, True])
@pytest.mark.parametrize("family", ["llama-tied", "qwen2"])
def test_untrained_head_copies_the_last_layers(
    family_dir: FamilyDir, family: str, own_lm_head: bool
) -> None:
    checkpoint = Checkpoint(family_dir(family))
    config = ExitConfig(layer=1, blocks=2, own_lm_head=own_lm_head)
    decoder: Any = load_decoder(checkpoint)
    head: Any = make_initial_head(checkpoint, config)
    for block, layer in zip(head.blocks, decoder.model.layers[1:], strict=True):
        torch.testing.assert_close(block.state_dict(), layer.state_dict(), rtol=0, atol=0)
    assert torch.equal(head.get_parameter("norm.weight"), decoder.model.norm.weight)
    if own_lm_head:
        assert head.lm_head is not None and torch.equal(head.lm_head.weight, decoder.lm_head.weight)


@pytest.mark.parametrize(
    ("layer", "blocks", "words"),
    [
        (0, 1, "exit layer must be between 1 and 2 for this 3-layer model; 0 was given"),
        (3, 1, "exit layer must be between 1 and 2 for this 3-layer model; 3 was given"),
        (-1, 1, "exit layer must be between 1 and 2"),
        (1, -1, "between 0 and 3 blocks; -1 were given"),
        (1, 4, "between 0 and 3 blocks; 4 were given"),
    ],
)
def test_impossible_heads_are_refused(
    family_dir: FamilyDir, layer: int, blocks: int, words: str
) -> None:
    with pytest.raises(EESDError, match=words):
        make_initial_head(Checkpoint(family_dir("llama2")), ExitConfig(layer, blocks))


def test_head_of_another_base_model_is_refused(family_dir: FamilyDir, tmp_path: Path) -> None:
    """With the same geometry; only the fingerprint differs."""
    checkpoint = Checkpoint(family_dir("mistral"))
    other = Checkpoint(build(FAMILIES["mistral"], tmp_path / "other", seed=1))
    save_exit_head(make_head(checkpoint), tmp_path / "head")
    with pytest.raises(EESDError, match="another base model") as caught:
        load_exit_head(other, tmp_path / "head")
    for word in (str(tmp_path / "head"), checkpoint.fingerprint()[:12], other.fingerprint()[:12]):
        assert word in str(caught.value)


@pytest.fixture(scope="module")
def stored(
    family_dir: FamilyDir, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, Path]:
    checkpoint = Checkpoint(family_dir("qwen2"))
    directory = tmp_path_factory.mktemp("head")
    save_exit_head(make_head(checkpoint), directory)
    return checkpoint, directory


@pytest.fixture
def damaged(stored: tuple[Checkpoint, Path], tmp_path: Path) -> tuple[Checkpoint, Path]:
    """A checkpoint, and a copy of its stored head that the test may damage."""
    return stored[0], shutil.copytree(stored[1], tmp_path / "head")


def refused(checkpoint: Checkpoint, directory: Path, *words: str) -> None:
    with pytest.raises(EESDError) as caught:
        load_exit_head(checkpoint, directory)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", [exit_head_file.CONFIG_FILE, exit_head_file.WEIGHTS_FILE])
def test_missing_file_is_refused(damaged: tuple[Checkpoint, Path], name: str) -> None:
    checkpoint, directory = damaged
    (directory / name).unlink()
    refused(checkpoint, directory, str(directory / name), "missing")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_weights_are_refused(damaged: tuple[Checkpoint, Path], keep: int) -> None:
    checkpoint, directory = damaged
    data = (directory / exit_head_file.WEIGHTS_FILE).read_bytes()
    (directory / exit_head_file.WEIGHTS_FILE).write_bytes(data[:keep])
    refused(checkpoint, directory, exit_head_file.WEIGHTS_FILE, "truncated", "fetch")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": 2}, "no tensor blocks.1."),
        ({"own_lm_head": True}, "no tensor lm_head.weight"),
        ({"layer": 3}, "exit layer must be between 1 and 2"),
        ({"layer": "two"}, "not an exit head's configuration"),
        ({"blocks": None}, "not an exit head's configuration"),
        ({"blocks": 4}, "between 0 and 3 blocks"),
        ({"base": 7}, "not an exit head's configuration"),
        ({"unknown": 1}, "not an exit head's configuration"),
        ({"base": "0" * 64}, "another base model"),
        ({"calibration": {}}, "calibration in"),
        ({"calibration": asdict(CalibrationPrior()) | {"accept": [1.0]}}, "must have 5 weights"),
        (
            {"calibration": asdict(CalibrationPrior()) | {"accept": "12345"}},
            "accept is '12345', which is of another type",
        ),
        (
            {"calibration": asdict(CalibrationPrior()) | {"shift": True}},
            "shift is True, which is of another type",
        ),
        (
            {"calibration": asdict(CalibrationPrior()) | {"following": [10**400] * 5}},
            "must be finite",
        ),
        ({"calibration": asdict(CalibrationPrior()) | {"request": -1.0}}, "0 or above"),
    ],
)
def test_damaged_config_is_refused(
    damaged: tuple[Checkpoint, Path], changes: dict[str, Any], words: str
) -> None:
    checkpoint, directory = damaged
    path = directory / exit_head_file.CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(checkpoint, directory, str(directory) if "between" not in words else "", words)


def test_config_without_a_layer_is_refused(damaged: tuple[Checkpoint, Path]) -> None:
    checkpoint, directory = damaged
    (directory / exit_head_file.CONFIG_FILE).write_text("{}")
    refused(checkpoint, directory, exit_head_file.CONFIG_FILE, "not an exit head's configuration")


@pytest.mark.parametrize("value", [None, torch.ones(32), torch.ones(64, dtype=torch.int8)])
def test_missing_and_wrong_tensors_are_refused(
    damaged: tuple[Checkpoint, Path], value: torch.Tensor | None
) -> None:
    checkpoint, directory = damaged
    tensors = load_file(directory / exit_head_file.WEIGHTS_FILE)
    del tensors["norm.weight"]
    save_file(
        tensors | ({} if value is None else {"norm.weight": value}),
        directory / exit_head_file.WEIGHTS_FILE,
    )
    refused(checkpoint, directory, str(directory), "norm.weight")
