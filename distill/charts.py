"""Draw the chart of a training run. It shows the loss and the tokens per round over the steps, and
the acceptance by depth."""

from pathlib import Path

from eesd.common.charts import check_charts, draw_acceptance, drawn
from eesd.distill.metrics import MetricsLog

NAME = "training.svg"
TITLES = ("Loss", "Tokens a round, on the validation prompts", "Acceptance by depth")


def check_training_chart(output: Path) -> None:
    """Raise :class:`EESDError` if no chart can be written into ``output``."""
    check_charts(output / NAME)


def draw_training(output: Path) -> Path:
    """Draw the metrics of the run in ``output``. Returns the chart's path.

    Raises:
        EESDError: The metrics are damaged, matplotlib is missing, or another program wrote the
            chart's file.
    """
    lines = MetricsLog(output).lines()
    losses = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "acceptance" in line]
    with drawn(output / NAME, TITLES) as (loss, tokens, acceptance):
        loss.plot([line["step"] for line in losses], [line["loss"] for line in losses])
        tokens.plot(
            [line["step"] for line in validations],
            [line["tokens_per_round"] for line in validations],
            marker="o",
        )
        for axes in (loss, tokens):
            axes.set_xlabel("step")
        ends = (*validations[:1], *validations[1:][-1:])
        by_depth = {f"step {line['step']}": line["acceptance"] for line in ends}
        draw_acceptance(acceptance, by_depth)
    return output / NAME
