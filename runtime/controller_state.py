"""What a controller learned, as a file: a process can start with what the last one knew.

The file is JSON. ``format``, ``model`` (fingerprint of the base model), ``drafter``, ``controller``, ``tree_width`` and
``tree_budget`` say how it was learned; ``state`` is what was learned.
"""

import json
import os
from pathlib import Path
from typing import Any

from eesd.common.checks import check_path, shown
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.json_input import read_json
from eesd.controllers.base import Stateful
from eesd.runtime.llm import LLM

FORMAT = 5


def save_controller_state(llm: LLM, path: str | os.PathLike[str]) -> None:
    """Write what was learned about rounds, drafts and the text. The file appears whole or not at all."""
    path = check_path("path", path, "the file to write")
    if llm.speculation is None:
        raise EESDError("This LLM does not draft, so its controller has learned nothing; load it with a Speculation.")
    try:
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(state_of(llm)) + "\n")
    except OSError as error:
        raise EESDError(f"{path} cannot be written ({error.strerror}); give another file.") from None


def load_controller_state(llm: LLM, path: str | os.PathLike[str]) -> None:
    """Continue with what :func:`save_controller_state` wrote.

    Raises:
        EESDError: The file is damaged, or was learned with another model, controller or tree.
    """
    path = check_path("path", path, "a file that save_controller_state wrote")
    if llm.speculation is None:
        raise EESDError("This LLM does not draft, so it has no controller that could learn; load it with a Speculation.")
    restore(llm, read_json(path, "give another --controller-state"), path)


def state_of(llm: LLM) -> dict[str, Any]:
    """What :func:`save_controller_state` writes."""
    return _learned_with(llm) | {"state": learned(llm)}


def restore(llm: LLM, saved: Any, path: Path) -> None:
    """Continue with what :func:`state_of` gave, which came from a file. Errors as in :func:`load_controller_state`."""
    expected = _learned_with(llm)
    if not isinstance(saved, dict) or saved.keys() != {*expected, "state"}:
        raise EESDError(f"{path} is not a controller state; give a file that --controller-state wrote.")
    for name, value in expected.items():
        if type(saved[name]) is not type(value) or saved[name] != value:
            raise EESDError(
                f"{path} was learned with {name} {shown(saved[name])}, this is {shown(value)}; give another --controller-state."
            )
    try:
        state = saved["state"]
        parts = _parts(llm)
        if not isinstance(state, dict) or state.keys() != parts.keys():
            raise ValueError(f"it must have the entries {', '.join(parts)}")
        for name, part in parts.items():
            if part:
                part.restore(state[name])
    except ValueError as error:
        raise EESDError(f"The controller state in {path} is damaged ({error}); delete it.") from None


def learned(llm: LLM) -> dict[str, Any]:
    """The states of everything that learns, as JSON values; None for a part that there is not."""
    return {name: part.state() if part else None for name, part in _parts(llm).items()}


def _parts(llm: LLM) -> dict[str, Stateful | None]:
    """What learns, and can be saved."""
    text = llm.text.rule if llm.text else None
    return {"value": llm.value, "controller": llm.controller, "budget": llm.budget, "text": text}


def _learned_with(llm: LLM) -> dict[str, Any]:
    """What must be the same for a state to fit."""
    assert llm.speculation is not None
    return {
        "format": FORMAT,
        "model": llm.manifest.exit_head.base,
        "drafter": llm.speculation.drafter,
        "controller": llm.speculation.controller,
        "tree_width": llm.speculation.tree_width,
        "tree_budget": llm.speculation.tree_budget,
    }
