"""A record of rounds: everything that the parts that decide were told, and what they answered.

The file is JSON lines. The first says how they were made. Each further one is a call, ``[part, method, arguments, answer]``; a
part is ``value`` (what rounds cost and are worth), ``controller``, ``guard``, ``budget`` or ``text`` (the rule for what the
text proposes).
``eesd-bench replay-rounds`` repeats the calls.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from math import isinf
from pathlib import Path
from typing import Any, TextIO, cast

from eesd.common.errors import EESDError
from eesd.common.outputs import check_own
from eesd.controllers import Controller
from eesd.controllers.text_rule import TextRule
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import RoundValue
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.llm import LLM

KIND, FORMAT = "rounds", 7
ENDS_ROUND = ("begin_request", "observe", "record")
"""Calls behind which the file is flushed, so that a process that dies leaves its rounds."""


@contextmanager
def log_rounds(llm: LLM, path: Path) -> Iterator[None]:
    """Record the rounds of ``llm`` until the block ends. All parts that decide start anew in it, as they do in a replay. What
    they learn ends with the block.

    Raises:
        EESDError: The LLM does not draft, or the file cannot be written, or is no such record.
    """
    if llm.speculation is None:
        raise EESDError("This LLM does not draft, so there is nothing to record; load it with a Speculation.")
    parts, new = (llm.value, llm.controller, llm.guard, llm.budget, llm.text), llm.with_speculation(llm.speculation)
    try:
        check_own(path, f'{{"kind": "{KIND}"')
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise EESDError(f"{path} cannot be written ({error.strerror}); give another file.") from None
    with file:
        calibration = llm.manifest.exit_head.calibration
        header = {"kind": KIND, "format": FORMAT, "speculation": asdict(llm.speculation)}
        _write(file, header | {"calibration": asdict(calibration) if calibration else None})
        llm.value = cast(RoundValue, _Recorded(file, "value", new.value))
        llm.controller = cast(Controller, _Recorded(file, "controller", new.controller)) if new.controller else None
        llm.guard = cast(Guard, _Recorded(file, "guard", new.guard)) if new.guard else None
        llm.budget = cast(TreeBudget, _Recorded(file, "budget", new.budget)) if new.budget else None
        llm.text = replace(new.text, rule=cast(TextRule, _Recorded(file, "text", new.text.rule))) if new.text else None
        try:
            yield
        finally:
            llm.value, llm.controller, llm.guard, llm.budget, llm.text = parts


class _Recorded:
    """Stands in for an object and writes down each call of its methods."""

    def __init__(self, file: TextIO, part: str, inner: object) -> None:
        self._file, self._part, self._inner = file, part, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            told = plain(arguments)  # before the call, which may change them
            answer = found(*arguments)
            _write(self._file, [self._part, name, told, plain(answer)])
            if name in ENDS_ROUND:
                self._file.flush()
            return answer

        return call


def plain(value: Any) -> Any:
    """A value as JSON: dataclasses as objects, tuples as lists, infinity (the margin of an only candidate) as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and isinf(value) else value


def _write(file: TextIO, value: Any) -> None:
    file.write(json.dumps(value) + "\n")
