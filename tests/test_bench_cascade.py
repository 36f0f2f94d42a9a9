"""The simulation of three levels counts rounds as they would run, and records what real engines agree on."""

from pathlib import Path

import numpy as np
import pytest
from support.command import assert_refused, run, succeed

from eesd.bench.tools.cascade import COSTS, Position, Scheme, compared, cost, main

RIGHT: Position = (3, 1, 0, 2, 0, 0, 0)
REPEATS: Position = (3, 0, 2, 0, 3, 4, 2)
UNITS = (0.1, 0.25, 0.01, 0.02)
"""A step of the exit head, of the quantized model, a further token in a pass of it, and of verify."""


@pytest.mark.parametrize(
    ("row", "scheme", "expected"),
    [
        ([RIGHT] * 4, Scheme(0, 0, 0, 0), 4.0),
        ([RIGHT] * 4, Scheme(0, 0, 0, 2), 2 * (2 * 0.1 + 1 + 2 * 0.02)),  # each round accepts one draft token of two
        ([RIGHT] * 4, Scheme(0, 3, 0, 0), 3 * 0.25 + 1 + 3 * 0.02),
        ([RIGHT] * 4, Scheme(0, 3, 0, 2), 2 * 0.1 + 0.25 + 2 * 0.01 + 1 + 3 * 0.02),  # one pass judges two, and adds the third
        ([RIGHT] * 4, Scheme(0, 3, 0, 3), 3 * 0.1 + 0.25 + 3 * 0.01 + 1 + 3 * 0.02),  # the third was not the quantized model's
        ([RIGHT] * 4, Scheme(2, 3, 0, 0), 3 * 0.25 + 1 + 3 * 0.02),  # nothing repeats
        ([REPEATS] * 3, Scheme(2, 0, 0, 0), 1 + 4 * 0.02),
        ([REPEATS] * 4, Scheme(0, 4, 2, 0), 0.25 + 4 * 0.01 + 1 + 4 * 0.02),
        ([REPEATS] * 4, Scheme(0, 1, 3, 0), 2 * (0.25 + 1 + 0.02)),  # too short a match
    ],
)
def test_rounds_cost_what_their_calls_do(row: list[Position], scheme: Scheme, expected: float) -> None:
    assert cost(row, scheme, UNITS, ideal=False) == pytest.approx(expected)


def test_with_known_lengths_nothing_wrong_is_drafted() -> None:
    assert cost([RIGHT] * 4, Scheme(0, 0, 0, 5), UNITS, ideal=True) == pytest.approx(2 * (0.1 + 1 + 0.02))
    assert cost([RIGHT] * 4, Scheme(0, 1, 0, 0), UNITS, ideal=True) == pytest.approx(3 * 0.25 + 1 + 3 * 0.02)
    assert cost([REPEATS] * 3, Scheme(2, 0, 0, 0), UNITS, ideal=True) == pytest.approx(1 + 2 * 0.02)


def test_the_best_of_each_kind_is_found() -> None:
    lines = {name: cells for name, *cells in compared([[RIGHT] * 4], UNITS, ideal=False)}
    assert lines["three levels"] == [f"{4 / 1.53:.2f}x", str(Scheme(0, 1, 0, 2))]  # a pass adds a token
    assert lines["two levels"] == lines["quantized"] == [f"{4 / 1.81:.2f}x", str(Scheme(0, 3, 0, 0))]
    assert lines["three over two levels"][0].startswith(f"{1.81 / 1.53:.2f}x")


def test_real_engines_are_recorded_and_read_again(engine: Path, quantized_engine: Path, tmp_path: Path) -> None:
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.npy"
    prompts.write_text('{"prompt": "abc abc abc"}\n{"prompt": "to be or not"}\n')
    given = ("--engines", quantized_engine, engine, "--prompts", prompts, "--size", 2, 12)
    shown = succeed(main, trace, *given).stdout
    found = np.load(trace)
    assert found.shape == (2, 12, 7) and found[..., 0].mean() > found[..., 1].mean(), "4 bits know more"
    assert all(f"{name}: " in shown for name in COSTS) and "2 prompts, 12 tokens each" in shown
    assert succeed(main, trace).stdout == shown
    assert_refused(run(main, trace, "--prompts", prompts), "--engines")
    assert_refused(run(main, prompts), "is not a trace")


def test_the_decision_rests_on_the_recorded_traces(pytestconfig: pytest.Config) -> None:
    """Decision 0116: three levels are not 15 % better on both models."""
    shown = succeed(main, pytestconfig.rootpath / "bench/results/cascade-smollm2.npy").stdout
    gains = [line.split("|")[2].strip() for line in shown.splitlines() if line.startswith("| three over two levels |")]
    assert gains == ["0.97x (0.90 to 1.05)", "0.98x (0.90 to 1.05)", "0.87x (0.81 to 0.95)"]
