"""Short runs that compare exit layers: acceptance, the cost of a draft step, and the predicted speed-up.

Costs are counted in decoder layers. A draft step runs N layers, E exit blocks and the LM head; a verify pass runs all L layers
and the LM head. On a GPU at batch 1 memory bandwidth is the limit, and its cost does not depend on its number of nodes; on a
CPU each further node costs c of a plain step. With the LM head as h layers, a round of n drafts costs n (N + E + h) +
(L + E + h) (1 + c n) (verify runs the E exit blocks, too), and a step of plain decoding costs L + h. With a draft vocabulary, a
draft step's LM head costs less.

The same rounds are also priced for a model of 8B and one of 70B on a GPU, with the same N and E.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eesd.common import markdown
from eesd.common.geometry import Geometry
from eesd.common.manifest import Manifest
from eesd.distill.acceptance import DRAFTS_PER_ROUND, Acceptance, ValidationSet, replay_acceptance
from eesd.distill.options import TrainingOptions
from eesd.distill.run import Run
from eesd.distill.structure import block_weights
from eesd.distill.trainer import Report
from eesd.distill.whole_draft import MOST_DRAFTS, correct_drafts, rounded, whole_draft
from eesd.export.forecast import draft_share
from eesd.model.exit_head import check_exit


@dataclass(frozen=True)
class LayerCosts:
    """Costs in units of one decoder layer.

    Attributes:
        layers: L, the number of layers of the model.
        lm_head: h, the cost of the LM head.
        draft_lm_head: The cost of its rows for the draft vocabulary.
        node: c, what each further node adds to verify, as a part of it.
    """

    layers: int
    lm_head: float
    draft_lm_head: float
    node: float = 0.0

    @classmethod
    def from_geometry(cls, geometry: Geometry, draft_vocab: int, node: float = 0.0) -> "LayerCosts":
        """Take costs to be proportional to the number of weights."""
        row = geometry.hidden_size / block_weights(geometry)
        return cls(geometry.num_layers, geometry.vocab_size * row, (draft_vocab or geometry.vocab_size) * row, node)

    @property
    def plain_step(self) -> float:
        return self.layers + self.lm_head

    def draft_step(self, exit_layer: int, blocks: int) -> float:
        return exit_layer + blocks + self.draft_lm_head

    def round(self, step: float, blocks: int, drafts: int) -> float:
        return drafts * step + (self.plain_step + blocks) * (1 + self.node * drafts)

    def best(
        self, step: float, blocks: int, correct: Sequence[NDArray[np.bool_]], most: int = DRAFTS_PER_ROUND
    ) -> tuple[int, float]:
        """The draft length with the highest speed-up, and that speed-up, over the replayed texts.

        Args:
            step: Cost of a draft step.
            blocks: Blocks of the head, which verify runs, too.
            correct: Which drafts are right; see :func:`replay_acceptance`.
            most: The longest draft to try.
        """
        speed_ups = {
            drafts: replay_acceptance(correct, drafts).tokens_per_round * self.plain_step / self.round(step, blocks, drafts)
            for drafts in range(1, most + 1)
        }
        drafts = max(speed_ups, key=speed_ups.__getitem__)
        return drafts, speed_ups[drafts]


LARGE = {"8B": LayerCosts(32, 2.41, 0.60), "70B": LayerCosts(80, 1.23, 0.31)}
"""Llama 3: an LM head of 128,256 tokens, a quarter of them drafted."""


@dataclass(frozen=True)
class Candidate:
    """An exit layer and block count, with the results of a short run.

    Attributes:
        exit_layer: N, the number of base layers before the head. L: the whole model drafts, in 4 bits.
        blocks: E, the number of decoder blocks in the head.
        acceptance: Acceptance in rounds of ``DRAFTS_PER_ROUND`` drafts.
        draft_cost: Cost of a draft step relative to a step of plain decoding.
        drafts: Draft length, up to ``DRAFTS_PER_ROUND``, of the whole model ``MOST_DRAFTS``, with the highest predicted
            speed-up.
        speed_up: The predicted speed-up with this draft length.
        large: The best draft length and its speed-up at the costs of ``LARGE``.
    """

    exit_layer: int
    blocks: int
    acceptance: Acceptance
    draft_cost: float
    drafts: int
    speed_up: float
    large: dict[str, tuple[int, float]]

    @property
    def options(self) -> str:
        """What chooses it."""
        return f"--exit-layer {self.exit_layer} --blocks {self.blocks}" if self.blocks else "eesd-export --exit-head quantized"


def search(run: Run, layers: Sequence[int], block_counts: Sequence[int], node: float, report: Report) -> list[Candidate]:
    """Train a head for each exit layer and block count, all on the same rows in the same order. Beside them is the whole model
    in 4 bits, which needs no training.

    Args:
        run: Options and parts of the run.
        layers: Exit layers to try.
        block_counts: Block counts to try for each exit layer.
        node: What each further node adds to verify, as a part of it.
        report: Called with each line of metrics.

    Returns:
        The candidates, highest predicted speed-up first.

    Raises:
        EESDError: The model cannot have such an exit head.
    """
    geometry = run.checkpoint.geometry
    pairs = [(layer, blocks) for layer in layers for blocks in block_counts]
    for layer, blocks in pairs:
        check_exit(geometry, run.head_config(_training(run.training, layer, blocks)))
    run.output.mkdir(parents=True, exist_ok=True)
    read = [*layers, *run.training.deep]
    validation, rows = run.validation_and_training_rows(read)
    targets = run.targets(rows, read)
    costs = LayerCosts.from_geometry(geometry, run.training.draft_vocab, node)
    whole = whole_draft(run.checkpoint)
    candidates = [_whole_model(run, whole, validation, costs)] if whole else []
    for layer, blocks in pairs:
        training = _training(run.training, layer, blocks)
        output = run.output / f"exit-{layer}-blocks-{blocks}"
        output.mkdir(exist_ok=True)
        trainer = run.trainer(run.initial_head(training, rows), training, rows, targets, validation, output)
        with run.progress(f"exit {layer}, {blocks} blocks", training.steps) as advance:
            acceptance = trainer.run(run.intervals, _labelled(report, f"exit {layer}, blocks {blocks}"), advance)
        correct = validation.correct_drafts(trainer.full_head(), geometry, trainer.lm_head)
        drafts, speed_up = costs.best(costs.draft_step(layer, blocks), blocks, correct)
        large = {name: others.best(others.draft_step(layer, blocks), blocks, correct) for name, others in LARGE.items()}
        draft_cost = costs.draft_step(layer, blocks) / costs.plain_step
        candidates.append(Candidate(layer, blocks, acceptance, draft_cost, drafts, speed_up, large))
    return sorted(candidates, key=lambda candidate: -candidate.speed_up)


def _whole_model(run: Run, whole: Manifest, validation: ValidationSet, costs: LayerCosts) -> Candidate:
    """The whole model as its own draft. Its step costs as much less than a plain one as its weights have fewer bytes."""
    device = run.accelerator.device
    draft = rounded(run.checkpoint.decoder(run.dtype), whole).to(device)
    correct, share = correct_drafts(validation, draft, run.training.precision, device), draft_share(whole)
    found = {name: of.best(share * of.plain_step, 0, correct, MOST_DRAFTS) for name, of in {"": costs, **LARGE}.items()}
    drafts, speed_up = found.pop("")
    return Candidate(run.checkpoint.geometry.num_layers, 0, replay_acceptance(correct), share, drafts, speed_up, found)


def _training(training: TrainingOptions, layer: int, blocks: int) -> TrainingOptions:
    """The options of a candidate, whose deep layers must be above its exit."""
    deep = tuple(one for one in training.deep if one > layer)
    return replace(training, exit_layer=layer, blocks=blocks, deep=deep)


def _labelled(report: Report, label: str) -> Report:
    return lambda metrics: report(metrics | {"label": label})


def table(candidates: Sequence[Candidate]) -> str:
    """A Markdown table of the candidates, and the recommendation."""
    depths = len(candidates[0].acceptance.verified)
    names = ["exit layer", "blocks", *(f"depth {d}" for d in range(1, depths + 1)), "draft cost", "drafts", "speed-up", *LARGE]
    rows = []
    for candidate in candidates:
        cells = [str(candidate.exit_layer), str(candidate.blocks)] if candidate.blocks else ["all, in 4 bits", "-"]
        cells += [f"{value:.3f}" for value in candidate.acceptance.by_depth]
        cells += [f"{candidate.draft_cost:.3f}", str(candidate.drafts), f"{candidate.speed_up:.2f}x"]
        cells += [f"{speed_up:.2f}x with {drafts}" for drafts, speed_up in candidate.large.values()]
        rows.append(cells)
    best = candidates[0]
    advice = f"Recommended: {best.options} (predicted {best.speed_up:.2f}x)."
    return "\n".join([*markdown.table(names, rows), advice])
