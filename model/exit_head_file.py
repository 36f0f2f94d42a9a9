"""Storing an exit head: ``exit_head.safetensors`` and ``exit_head.json``, tied to the base model by
its fingerprint."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.geometry import LARGEST_SIZE, ExitConfig
from eesd.common.json_input import from_json, read_json_object
from eesd.common.prior import CalibrationPrior
from eesd.model.decoder import ExitHead
from eesd.model.fields import Fields

WEIGHTS_FILE, CONFIG_FILE = "exit_head.safetensors", "exit_head.json"


def save(head: ExitHead, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head into a directory.

    Each file appears complete or not at all. The JSON file is written last, because it makes the
    directory a checkpoint.

    Args:
        head: The exit head.
        directory: Directory to write into; it is created if needed.
        dtype: Element type of the stored weights. The draft vocabulary is int32.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kinds = {
        name: dtype if value.is_floating_point() else torch.int32
        for name, value in head.state_dict().items()
    }
    state = {
        name: value.detach().to(kinds[name]).contiguous()
        for name, value in head.state_dict().items()
    }
    with written_whole(directory / WEIGHTS_FILE) as temporary:
        save_file(state, temporary)
    save_config(head.exit_config, directory)


def save_config(config: ExitConfig, directory: Path) -> None:
    """Write only the JSON file of a head."""
    # EAGLE heads come in files of other projects.
    fields = {name: value for name, value in asdict(config).items() if name != "eagle"}
    with written_whole(directory / CONFIG_FILE) as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n")


def read_exit_config(directory: Path, base: str | None) -> ExitConfig:
    """Read the configuration of a stored head.

    Args:
        directory: Directory of the head.
        base: Fingerprint of the base model; None: its weights are not there, and any will do.

    Raises:
        EESDError: The file is missing or damaged, or the head was trained for another base model.
    """
    if not (directory / CONFIG_FILE).exists():
        raise EESDError(
            f"{directory / CONFIG_FILE} is missing; give the directory of a trained exit head."
        )
    raw = read_json_object(directory / CONFIG_FILE, "train the head again")
    fields = Fields(raw)
    try:
        config = ExitConfig(
            layer=fields.integer("layer"),
            blocks=fields.integer("blocks", 1, least=0),
            own_lm_head=fields.flag("own_lm_head"),
            base=fields.text("base") or "",
            trained=fields.flag("trained"),
            draft_vocab=fields.integer("draft_vocab", 0, least=0, most=LARGEST_SIZE),
            deep=fields.token_ids("deep") or (),
        )
        calibration = fields.take("calibration", None)
        if fields.left:
            raise ValueError(f"unknown entries {', '.join(map(shown, fields.left[:3]))}")
    except (KeyError, ValueError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise EESDError(
            f"{directory / CONFIG_FILE} is not an exit head's configuration ({problem}); "
            "point --exit-head at one."
        ) from None
    if base is not None and config.base != base:
        raise EESDError(
            f"The exit head in {directory} was trained on another base model "
            f"(fingerprint {config.base[:12]}, this model is {base[:12]}); train one for this "
            "model."
        )
    try:
        return replace(
            config,
            calibration=None if calibration is None else from_json(CalibrationPrior, calibration),
        )
    except ValueError as error:
        raise EESDError(
            f"The calibration in {directory / CONFIG_FILE} is damaged ({error}); "
            "delete this entry, and fit it again with eesd-distill --steps 0."
        ) from None
