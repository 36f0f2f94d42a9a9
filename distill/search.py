"""Which exit layer? Short runs for each candidate, what they accept, what a draft costs, and the speed-up that follows.

Costs are counted in layers: a draft step runs N layers, E exit blocks and the LM head, a verify pass all L layers and the LM
head, whatever the number of its tokens (true where memory bandwidth rules, as at batch 1 on a GPU). A round of n drafts costs
T(n) = n (N + E + h) + L + E + h, where the last E is the exit blocks that verify runs too; a plain step costs L + h.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eesd.common.geometry import Geometry
from eesd.distill.acceptance import DEPTHS, Acceptance, replay
from eesd.distill.run import Report, Run
from eesd.distill.trainer import Trainer
from eesd.model.exit_head import check_exit


@dataclass(frozen=True)
class Costs:
    """Times of the parts in units of one layer: the LM head ``h``, and of all: a plain step, a draft step, a round."""

    layers: int
    head: float

    @classmethod
    def of(cls, geometry: Geometry) -> "Costs":
        """Counted from weights: an LM head costs as many layers as it has layers' worth of weights."""
        embeddings = geometry.vocab_size * geometry.hidden_size
        layers = geometry.parameters - embeddings * (1 if geometry.tied_embeddings else 2)
        return cls(geometry.num_layers, embeddings / (layers / geometry.num_layers))

    @property
    def plain(self) -> float:
        return self.layers + self.head

    def draft(self, exit_layer: int, blocks: int) -> float:
        return exit_layer + blocks + self.head

    def round(self, exit_layer: int, blocks: int, drafts: int) -> float:
        return drafts * self.draft(exit_layer, blocks) + self.plain + blocks


@dataclass(frozen=True)
class Candidate:
    """One exit layer and block count: acceptance of rounds of 8 drafts, cost of a draft step over a plain step, and the best
    predicted speed-up with the number of drafts that gives it."""

    exit_layer: int
    blocks: int
    acceptance: Acceptance
    draft_cost: float
    drafts: int
    speed_up: float


def best_drafts(tokens_per_round: Callable[[int], float], costs: Costs, exit_layer: int, blocks: int) -> tuple[int, float]:
    """The number of drafts a round with the largest predicted speed-up, and that speed-up."""
    gains = {
        drafts: tokens_per_round(drafts) * costs.plain / costs.round(exit_layer, blocks, drafts)
        for drafts in range(1, DEPTHS + 1)
    }
    best = max(gains, key=lambda drafts: gains[drafts])
    return best, gains[best]


def search(run: Run, layers: Sequence[int], block_counts: Sequence[int], report: Report) -> list[Candidate]:
    """Train a head for each exit layer and block count, all on the same rows in the same order, best predicted first."""
    geometry = run.checkpoint.geometry
    for layer in layers:
        for blocks in block_counts:
            check_exit(geometry, layer, blocks)
    run.output.mkdir(parents=True, exist_ok=True)
    validation, rows = run.validation_and_rows(layers)
    source = run.preparation.source(rows, layers, run.offline)
    lm_head, costs, found = run.checkpoint.lm_head().float(), Costs.of(geometry), []
    for layer in layers:
        for blocks in block_counts:
            training = replace(run.training, exit_layer=layer, blocks=blocks)
            output = run.output / f"exit-{layer}-blocks-{blocks}"
            output.mkdir(exist_ok=True)
            head = run.first_head(training)
            trainer = Trainer(
                run.accelerator, head, geometry, lm_head, training, rows, source, validation, output, run.identity(rows),
                run.compiled,
            )  # fmt: skip
            with run.bar(f"exit {layer}, {blocks} blocks", training.steps) as advance:
                acceptance = trainer.run(run.every, _labelled(report, layer, blocks), advance)
            bits = validation.bits(trainer.whole_head(), geometry, trainer.lm_head)
            drafts, gain = best_drafts(lambda n, bits=bits: replay(bits, n).tokens_per_round, costs, layer, blocks)  # type: ignore[misc]
            found.append(Candidate(layer, blocks, acceptance, costs.draft(layer, blocks) / costs.plain, drafts, gain))
    return sorted(found, key=lambda candidate: -candidate.speed_up)


def _labelled(report: Report, layer: int, blocks: int) -> Report:
    def labelled(figures: dict[str, Any]) -> None:
        report(figures | {"label": f"exit {layer}, blocks {blocks}"})

    return labelled


def table(candidates: Sequence[Candidate]) -> str:
    """A Markdown table of the candidates, best first, and the recommendation."""
    depths = len(candidates[0].acceptance.offered)
    names = ["exit layer", "blocks", *(f"depth {d}" for d in range(1, depths + 1)), "draft cost", "drafts", "speed-up"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for c in candidates:
        cells = [str(c.exit_layer), str(c.blocks), *(f"{value:.3f}" for value in c.acceptance.by_depth)]
        cells += [f"{c.draft_cost:.3f}", str(c.drafts), f"{c.speed_up:.2f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    best = candidates[0]
    advice = f"Recommended: --exit-layer {best.exit_layer} --blocks {best.blocks} (predicted {best.speed_up:.2f}x)."
    return "\n".join([*lines, "", advice])
