"""The figures of a run: JSON lines, TensorBoard events where tensorboard is installed, and a picture of the curves."""

import json
from pathlib import Path
from typing import Any

from eesd.common.files import written_whole


class Metrics:
    """``metrics.jsonl`` (one object a line: training figures, or acceptance by depth), ``events/``, ``curves.png``."""

    def __init__(self, output: Path) -> None:
        self.output, self.path = output, output / "metrics.jsonl"
        self._writer: Any = None

    def start(self, step: int) -> None:
        """Go on after ``step``: what a run noted behind its last checkpoint will be noted again."""
        kept = [line for line in self.lines() if line["step"] <= step]
        with written_whole(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(self.output / "events"), purge_step=step + 1)

    def lines(self) -> list[dict[str, Any]]:
        """All figures so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, figures: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        if self._writer is not None:
            for name, value in figures.items():
                numbered = enumerate(value, 1) if isinstance(value, list) else [(0, value)]
                for depth, number in numbered:
                    if name != "step":
                        self._writer.add_scalar(f"{name}/{depth}" if depth else name, number, figures["step"])
            self._writer.flush()

    def plot(self) -> None:
        """Draw losses and acceptance by depth over the steps; nothing without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return
        lines = self.lines()
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        steps = [line for line in lines if "loss" in line]
        for name in ("loss", "ce", "kl"):
            left.plot([line["step"] for line in steps], [line[name] for line in steps], label=name)
        left.set(xlabel="step", ylabel="nats a token", title="training losses")
        checks = [line for line in lines if "acceptance" in line]
        for depth in range(len(checks[0]["acceptance"]) if checks else 0):
            right.plot([c["step"] for c in checks], [c["acceptance"][depth] for c in checks], label=f"depth {depth + 1}")
        right.set(xlabel="step", ylabel="accepted", title="validation: acceptance by draft depth")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        with written_whole(self.output / "curves.png") as temporary:
            figure.savefig(temporary, format="png", dpi=120)
