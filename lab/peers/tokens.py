"""Compare greedy tokens of EESD and llama.cpp. At the first difference, show both margins.

A margin is the logit of the token that a runtime chose minus its logit of the token that the other
runtime chose. If rounding decides, both margins are small.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eesd.common.markdown import table
from lab.peers.process import Process
from lab.peers.results import Prompt
from lab.peers.table import common


def compare_tokens(
    prompts: Sequence[Prompt], running: Sequence[Process], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Decode each prompt with two runtimes. Returns for each prompt its id, the number of equal
    tokens, and the margins of the first difference."""
    own, other = running
    found: list[dict[str, Any]] = []
    for prompt in prompts:
        asked = {"prompt": prompt.tokens, "count": prompt.count, "temperature": 0.0}
        texts = [process.ask("generate", **asked)["tokens"] for process in running]
        equal = common(*texts)
        row: dict[str, Any] = {"prompt": prompt.id, "equal": equal, "count": prompt.count}
        if equal < prompt.count:
            before = [*prompt.tokens, *texts[0][:equal]]
            first, second = (text[equal] for text in texts)
            row["margins"] = [
                _margin(own, before, first, second),
                _margin(other, before, second, first),
            ]
        found.append(row)
        report(str(row))
    return found


def _margin(process: Process, tokens: list[int], chosen: int, other: int) -> float:
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "logits.npy"
        process.ask("logits", tokens=tokens, output=str(file))
        last = np.load(file)[-1]
    return float(last[chosen] - last[other])


def markdown(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the report. They show the number of equal texts, and have a row for each
    text that differs."""
    rows = [
        [row["prompt"], row["equal"], *(f"{margin:.3f}" for margin in row["margins"])]
        for row in found
        if "margins" in row
    ]
    equal = len(found) - len(rows)
    count = max(row["count"] for row in found)
    return [
        f"{equal} of {len(found)} greedy texts of {count} tokens equal llama.cpp's.",
        "",
        *(table(["", "equal tokens", "EESD's margin", "llama.cpp's margin"], rows) if rows else []),
    ]
