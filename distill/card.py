"""The model card of a head: ``README.md`` beside its weights, as Hugging Face repositories have it."""

import json
from collections.abc import Mapping
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig
from eesd.common.markdown import table_text
from eesd.common.outputs import check_own
from eesd.common.terminal import notice
from eesd.distill.acceptance import Acceptance
from eesd.distill.data import Rows
from eesd.distill.options import TrainingOptions
from eesd.distill.stored import saved_whole
from eesd.model.exit_head import ExitHead
from eesd.model.hub import ALIASES

CARD_FILE = "README.md"
_BEGINNING = '---\nlibrary_name: "eesd"'


def write_card(
    directory: Path,
    model: str,
    licence: str | None,
    head: ExitHead,
    rows: Rows,
    training: TrainingOptions,
    processes: int,
    acceptance: Acceptance,
    kinds: Mapping[str, Acceptance],
) -> None:
    """Write the card.

    Args:
        directory: Directory of the head.
        model: The model, as the command names it.
        licence: Of the head; None: it is not said.
        head: The trained head.
        rows: What it was trained on.
        training: Options of the training.
        processes: Processes that trained.
        acceptance: On the validation texts.
        kinds: The same by kind of prompt; empty if there is one kind.
    """
    path = directory / CARD_FILE
    try:
        check_own(path, _BEGINNING)
    except EESDError:
        notice(f"{path} is not of eesd-distill, and stays; the head gets no card.")
        return
    with saved_whole(path) as temporary:
        facts = table_text(("", ""), _facts(head, rows, training, processes, acceptance).items())
        parts = [
            _metadata(model, licence),
            f"# Exit head of {Path(model).name if Path(model).exists() else model}",
            facts,
            *([_kinds(kinds)] if len(kinds) > 1 else []),
            _use(model),
        ]
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _metadata(model: str, licence: str | None) -> str:
    """What a hub reads: YAML, in JSON's form of it. A local path says nothing to others."""
    entries: dict[str, object] = {"tags": ["speculative-decoding", "exit-head"]}
    if not Path(model).exists():
        entries["base_model"] = ALIASES.get(model, model)
    if licence is not None:
        entries["license"] = licence
    return "\n".join([_BEGINNING, *(f"{name}: {json.dumps(value)}" for name, value in entries.items()), "---"])


def _facts(head: ExitHead, rows: Rows, training: TrainingOptions, processes: int, acceptance: Acceptance) -> dict[str, str]:
    tokens, count = int(rows.lengths.sum()), training.rows_per_step(processes)
    seen = tokens / len(rows) * count * training.steps
    depths = " ".join(f"{value:.3f}" for value in acceptance.by_depth)
    return {
        "exit head": _described(head.exit_config, sum(value.numel() for value in head.parameters())),
        "text": f"{tokens:,} tokens in {len(rows):,} rows",
        "training": f"{training.steps:,} steps of {count} rows, about {seen / 1e6:.1f} M tokens seen; {training.optimizer}, "
        f"rate {training.lr:g}, seed {training.seed}",
        "acceptance": f"greedy, by depth, in rounds of {len(acceptance.by_depth)} drafts: {depths}; "
        f"{acceptance.tokens_per_round:.2f} tokens per round, over {acceptance.tokens:,} tokens of held-out text",
    }


def _described(config: ExitConfig, weights: int) -> str:
    """A head in words."""
    blocks = {0: "norm", 1: "one block"}.get(config.blocks, f"{config.blocks} blocks")
    deep = f", deep layers {', '.join(map(str, config.deep))}" if config.deep else ""
    lm_head = "its own LM head" if config.own_lm_head else "the model's LM head"
    tokens = f"{config.draft_vocab:,} tokens" if config.draft_vocab else "all tokens"
    return f"{blocks} after layer {config.layer}{deep}; {lm_head}, for {tokens}; {weights / 1e6:.1f} M weights"


def _kinds(kinds: Mapping[str, Acceptance]) -> str:
    rows = [(kind, f"{one.by_depth[0]:.3f}", f"{one.tokens_per_round:.2f}") for kind, one in kinds.items()]
    return table_text(("held-out text", "first token right", "tokens per round"), rows)


def _use(model: str) -> str:
    return (
        f"    eesd-export --model {model} --exit-head . -o plans/\n"
        "    eesd-run --engine-dir plans/ --prompt '...' --compare\n\n"
        "The head changes speed, not text. `eesd-distill` wrote this card; `metrics.jsonl` and `curves.png` show all steps."
    )
