"""``python -m lab.starts``: simulate many starts of a process, to see whether drafting loses time
if it does not pay, and whether it continues if it pays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import click
import numpy as np

from eesd.bench.replay.costs import COST_MODELS, CostModel
from eesd.bench.replay.simulation import MEASURED, find_costs
from eesd.bench.replay.traces import Trace, load_trace
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.prior import CalibrationPrior
from eesd.controllers import make_controller
from eesd.runtime.decoding.drafting import Speculation
from eesd.runtime.decoding.guard import Guard
from lab.machine import Machine, burst, changing_load, decode
from lab.streams import SyntheticStream

PRIOR = CalibrationPrior(accept=(0, 0, 1, 0, 0), following=(0, 0, 1, 0, 0))
"""The calibration prior of the synthetic heads. It takes the stated confidence at face value."""
HEADS = {
    "useless": SyntheticStream("useless", (0.02, 0.1), 0.5, 0.25, 1.5),
    "overrated": SyntheticStream("overrated", (0.05, 0.15, 0.35), 0.5, 0.25, 1.4),
    "pays": SyntheticStream("pays", (0.2, 0.45, 0.75), 0.6, 0.25),
}
"""The synthetic heads. The first is useless, the second has an acceptance of .19 but looks like
.45, and the third gives a speed-up of 1.15 with the costs ``4bit``."""
MACHINES = ("steady", "load", "stalls", "burst")
"""The disturbances of the machines. These are no disturbance, other programs that come and go, 20
stalls per second, and one second in which calls are five times slower."""
NOISE = (0.02, 0.15)
"""The range from which the noise is drawn. It is the standard deviation of the logarithm of a
call's seconds."""
STALLS = 20.0
"""Stalls per second. With passes of 6 ms, every eighth pass has a stall."""
REQUESTS = 18
TOKENS = 128
SETTLED = 256
"""Number of tokens after which a process should have found out whether drafting pays."""


@dataclass(frozen=True)
class Start:
    """The time that one process lost by drafting. It is given as a share of the time that plain
    decoding takes, without noise and disturbances.

    Attributes:
        first: Loss over the first 100 tokens.
        thousand: Loss over the first 1,000 tokens.
        behind: Loss over the tokens after the first ``SETTLED``.
        drafting: Share of drafting rounds after the first ``SETTLED`` tokens.
    """

    first: float
    thousand: float
    behind: float
    drafting: float


def simulate_starts(
    head: SyntheticStream | Trace, costs: CostModel, machine: str, spec: str, starts: int
) -> Iterator[Start]:
    """Start processes on one of ``MACHINES``. Each decodes with a fresh controller (``spec``) and a
    fresh guard.

    The drafts are synthetic or recorded. With recorded drafts, each process decodes the requests in
    a different order. ``costs`` are the costs on an undisturbed machine.
    """
    seconds = costs.calls.scaled(costs.plain_seconds)
    for seed in range(starts):
        random = np.random.default_rng([seed, 7])
        if isinstance(head, Trace):
            trace = Trace(
                tuple(head.requests[i] for i in random.permutation(len(head.requests))),
                head.origin,
                prior=head.prior,
            )
        else:
            trace = Trace(head.trace(TOKENS, REQUESTS, seed).requests, {}, prior=PRIOR)
        noise = float(random.uniform(*NOISE))
        disturbance = {
            "load": lambda random=random: changing_load(random),
            "burst": lambda random=random: burst(int(random.integers(300)), 5.0, 5.0),
        }.get(machine, lambda: None)()
        simulated = Machine(
            seconds, noise, disturbance, seed, STALLS if machine == "stalls" else 0.0
        )
        run = decode(trace, simulated, make_controller(spec, seed, trace.prior), Guard())
        lost = (run.lost(seconds, 0, 100), run.lost(seconds, 0, 1000), run.lost(seconds, SETTLED))
        yield Start(*lost, run.drafting(SETTLED))


def table(head: str, machine: str, found: Sequence[Start]) -> str:
    """Return a line for the starts of one head on one machine. It shows three values of each
    figure: the worst value, the worst value that remains without the worst 5 %, and the median."""
    parts = [
        f"{label} {_spread([getattr(start, name) for start in found], worst)}"
        for label, name, worst in (
            ("lost of 100 tokens", "first", max),
            ("of 1000", "thousand", max),
            (f"after {SETTLED}", "behind", max),
            ("drafting", "drafting", min),
        )
    ]
    return f"{head:9} {machine:6} {', '.join(parts)}"


def _spread(values: Sequence[float], worst: object) -> str:
    ordered = sorted(values, reverse=worst is max)
    return " / ".join(f"{ordered[int(share * len(ordered))]:.1%}" for share in (0.0, 0.05, 0.5))


@cli.command()
@click.option(
    "--trace",
    type=cli.PATH,
    help="Trace recorded by simulate --engine-dir, to use instead of synthetic texts.",
)
@click.option(
    "--costs",
    help=(
        f"Cost model: {', '.join((MEASURED, *COST_MODELS))}.  [default: 4bit, or measured "
        "with --trace]"
    ),
)
@click.option("--controller", default=Speculation().controller, help="Controller and its options.")
@click.option(
    "--starts",
    type=click.IntRange(1, 10_000),
    default=200,
    help="Number of processes for each head and machine.",
)
def main(trace: Path | None, costs: str | None, controller: str, starts: int) -> None:
    """Simulate new processes on a machine with noise, load, stalls and a burst, and print the time
    that drafting costs them."""
    make_controller(controller)
    recorded = load_trace(trace) if trace else None
    name = costs or (MEASURED if recorded else "4bit")
    if recorded is None and name == MEASURED:
        raise EESDError(
            f"Only a --trace has measured costs; give --costs with one of {', '.join(COST_MODELS)}."
        )
    model = find_costs([name], recorded).get(name) or COST_MODELS[name]
    heads = {"recorded": recorded} if recorded else HEADS
    click.echo("worst / 5 % / median of each")
    for head, machine in product(heads, MACHINES):
        click.echo(
            table(
                head, machine, [*simulate_starts(heads[head], model, machine, controller, starts)]
            )
        )


if __name__ == "__main__":
    main()
