"""The files of an exit head are ``exit_head.safetensors`` and ``exit_head.json``. The JSON file has
the fingerprint of the base model."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.geometry import LARGEST_SIZE, ExitConfig
from eesd.common.json_input import from_json, read_json_object
from eesd.common.prior import CalibrationPrior
from eesd.model.fields import Fields

HEAD_FILES = WEIGHTS_FILE, CONFIG_FILE = "exit_head.safetensors", "exit_head.json"


def save_config(config: ExitConfig, directory: Path) -> None:
    """Write only the JSON file of a head."""
    # EAGLE-3 heads keep their published files.
    fields = {name: value for name, value in asdict(config).items() if name != "eagle"}
    with written_whole(directory / CONFIG_FILE) as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n")


def read_exit_config(directory: Path, base: str | None) -> ExitConfig:
    """Read the configuration of a stored head.

    Args:
        directory: Directory of the head.
        base: Fingerprint of the base model. It is None if the weights are not available, because
            there is no fingerprint without them. A head of any model is then accepted.

    Raises:
        EESDError: The file is missing or damaged, or the head was trained for another base model.
    """
    if not (directory / CONFIG_FILE).exists():
        raise EESDError(
            f"{directory / CONFIG_FILE} is missing; give the directory of a trained exit head, or "
            f"remove {WEIGHTS_FILE} from a model to export it without."
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
            mlp=fields.integer("mlp", None, optional=True, least=0, most=LARGEST_SIZE),
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
    if calibration is None:
        return config
    try:
        return replace(config, calibration=from_json(CalibrationPrior, calibration))
    except ValueError as error:
        raise EESDError(
            f"The calibration in {directory / CONFIG_FILE} is damaged ({error}); "
            "delete this entry, and fit it again with eesd-distill --steps 0."
        ) from None
