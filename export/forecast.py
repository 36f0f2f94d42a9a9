"""What an export will be, said before its long work: the model, its head, disk, memory, and what drafts should be worth."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul

from eesd.common.manifest import Manifest
from eesd.common.weights import model_shapes
from eesd.export.memory import slot_bytes
from eesd.export.predict import bytes_of_pass


def forecast(manifest: Manifest, size: int, free: int, acceptance: Sequence[float]) -> list[str]:
    """Lines for the user.

    Args:
        manifest: Of the directory that will be written.
        size: Bytes of its weights.
        free: Bytes of the disk.
        acceptance: Of the head by depth, as its training measured it; empty: unknown.
    """
    geometry = manifest.geometry
    weights = sum(map(prod, model_shapes(geometry).values()))
    slots = manifest.max_seq_len * slot_bytes(manifest, manifest.num_caches)
    return [
        f"{manifest.model}: {geometry.architecture}, {geometry.num_layers} layers of {geometry.hidden_size}, "
        f"{weights / 1e6:,.0f} M weights",
        f"will take {size / 1e9:.2f} GB of {free / 1e9:.0f} GB that the disk has, and in memory as much, and "
        f"{slots / 1e9:.2f} GB for a request that fills {manifest.max_seq_len} slots",
        _drafts(manifest, acceptance),
    ]


def _drafts(manifest: Manifest, acceptance: Sequence[float]) -> str:
    draft = draft_share(manifest)
    text = f"a draft step will read {100 * draft:.0f} % of a plain step's weights"
    if not manifest.exit_head.can_draft:
        return "no exit head: drafts come from the text, where it repeats"
    if manifest.exit_head.is_whole(manifest.geometry):
        return f"{text}: the whole model in fewer bits, right in most of its drafts"
    if not manifest.exit_head.trained:
        return f"{text}; its head is not trained, so drafts will be worth nothing"
    if not acceptance:
        return f"{text}; how often its head is right is not known: eesd-distill --steps 0 --init-head measures it"
    tokens, worth = worth_of(acceptance, draft)
    return f"{text}; its head gave {tokens:.2f} tokens a round on held-out text: up to {worth:.2f} times as fast"


def draft_share(manifest: Manifest) -> float:
    """What a draft step reads, as a part of a plain step."""
    return bytes_of_pass(manifest, manifest.draft, 0) / sum(bytes_of_pass(manifest, stage, 0) for stage in manifest.verify)


def worth_of(acceptance: Sequence[float], draft: float) -> tuple[float, float]:
    """What the best number of drafts is worth where a pass costs what it reads, as on a GPU.

    Args:
        acceptance: Chance of a draft by depth, if those before it were right.
        draft: Cost of a draft step, as a part of a plain step.

    Returns:
        Tokens a round with all these drafts, and the speed-up of the best number of them.
    """
    right = [0.0, *accumulate(acceptance, mul)]
    tokens = [1 + part for part in accumulate(right)]
    return tokens[-1], max(count / (1 + number * draft) for number, count in enumerate(tokens))
