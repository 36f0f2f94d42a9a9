"""Replays a record of rounds (``eesd-run --log-rounds``): the same calls must get the same answers."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.json_input import from_json, json_lines, read_text
from eesd.common.prior import CalibrationPrior
from eesd.controllers import DraftStep, RoundOutcome, make_controller
from eesd.controllers.text_rule import TextRule, TextStep
from eesd.controllers.tree_budget import SiblingLabel, TreeBudget
from eesd.controllers.value import RoundValue
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.round_log import FORMAT, KIND, plain

REMEDY = "give a file that --log-rounds wrote"


@dataclass(frozen=True)
class Difference:
    """An answer that is not the recorded one. ``line`` counts from 1."""

    line: int
    call: str
    recorded: Any
    replayed: Any


def replay_rounds(path: Path) -> tuple[int, list[Difference]]:
    """Make the parts as recorded, and repeat all calls.

    Returns:
        The number of rounds, and the answers that differ; none, if this is the code that recorded them.

    Raises:
        EESDError: The file cannot be read, or is not a record of rounds.
    """
    (_, header), *calls = [*json_lines(read_text(path, REMEDY), str(path), REMEDY)] or [(1, None)]
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise EESDError(f"{path} is not a record of rounds; {REMEDY}.")
    if header.get("format") != FORMAT:
        raise EESDError(f"{path} has another format than {FORMAT}; record it again.")
    differences = []
    try:
        parts = _made(header)
        for line, (part, method, told, recorded) in calls:
            answer = plain(getattr(parts[part], method)(*_arguments(part, method, told)))
            if answer != recorded:
                differences.append(Difference(line, f"{part}.{method}", recorded, answer))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError):
        raise EESDError(f"{path} is damaged; {REMEDY}.") from None
    return sum(call[:2] == ["value", "observe"] for _, call in calls), differences


def _made(header: dict[str, Any]) -> dict[str, Any]:
    """New parts, as those were when the record began."""
    speculation = header["speculation"]
    prior = from_json(CalibrationPrior, header["calibration"]) if header["calibration"] else None
    value = RoundValue()
    return {
        "value": value,
        "controller": make_controller(speculation["controller"], speculation["seed"], prior, value),
        "guard": Guard(),
        "budget": TreeBudget(prior=prior, value=value),
        "text": TextRule(value=value),
    }


def _arguments(part: str, method: str, told: list[Any]) -> list[Any]:
    """The arguments of a call."""
    if method in ("keep_drafting", "chances"):
        return [_step(told[0]), *told[1:]]
    if part == "text" and method == "chance":
        return [TextStep(*told[0])]
    if part == "text" and method == "observe":
        return [[TextStep(*step) for step in told[0]], *told[1:3], RoundOutcome(**told[3])]
    if method == "record":
        return [RoundOutcome(**told[0]), *told[1:]]
    if method in ("observe", "expected_tokens"):
        labels = [[SiblingLabel(**label) for label in told[0]]] if part == "budget" else []
        return [*labels, RoundOutcome(**told[-1])]
    return told


def _step(values: list[Any]) -> DraftStep:
    step = DraftStep(*values)
    return step._replace(margin=inf) if step.margin is None else step
