"""The log of a run is the file ``metrics.jsonl``."""

import json
from pathlib import Path
from typing import Any

from eesd.common.json_input import json_lines, read_text
from eesd.distill.stored import damaged, saved_whole, saving


class MetricsLog:
    """Writes ``metrics.jsonl``. Each line is a JSON object with training metrics or a
    validation."""

    def __init__(self, output: Path) -> None:
        self.path = output / "metrics.jsonl"

    def start(self, step: int) -> None:
        """Continue after ``step``. Lines of later steps are deleted, because the run logs those
        steps again.

        Raises:
            EESDError: The file is damaged.
        """
        kept = [line for line in self.lines() if line["step"] <= step]
        with saved_whole(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def lines(self) -> list[dict[str, Any]]:
        """Return all metrics so far. An incomplete last line, which a killed run may leave, is
        ignored."""
        if not self.path.exists():
            return []
        remedy = "delete it, and the next run begins a new one"
        text, _, _ = read_text(self.path, remedy).rpartition("\n")
        lines = [line for _, line in json_lines(text, str(self.path), remedy)]
        depths = {
            len(line["acceptance"]) for line in lines if _is_metrics(line) and "acceptance" in line
        }
        if not all(map(_is_metrics, lines)) or len(depths) > 1:
            raise damaged(self.path, remedy)
        return lines

    def add(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        with saving(self.path), self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


def _is_metrics(line: Any) -> bool:
    """Whether a value is a valid line of the log. A line has the metrics of a step or a
    validation."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    values = (
        line["acceptance"]
        if "acceptance" in line
        else [line.get(name) for name in ("loss", "ce", "kl")]
    )
    return isinstance(values, list) and all(isinstance(value, int | float) for value in values)
