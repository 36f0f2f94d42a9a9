"""Acceptance of the whole model in 4 bits as its own draft, which needs no training: what a trained head has to beat.

A parallel pass with the rounded weights says what the draft proposes behind each token. Its keys and values of the text are
rounded, too, where a runtime's draft reads those of verify. So this is a little less than a runtime's acceptance.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from eesd.common.manifest import Manifest
from eesd.common.weights import BLOCK, is_linear
from eesd.distill.acceptance import ValidationSet
from eesd.distill.teacher import Teacher
from eesd.export.engine_dir import untrained_draft
from eesd.export.make import choose_quantization, most_have_few_bits
from eesd.export.outline import outline
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import Decoder
from eesd.model.quantize import dequantize, quantize

MOST_DRAFTS = 12
"""Drafts of a round that are tried. They are right more often than a head's, so more of them pay."""


def whole_draft(checkpoint: Checkpoint) -> Manifest | None:
    """The manifest, without files, of an export whose draft is the whole model; None: its weights have too few bits."""
    quantization = choose_quantization(checkpoint, checkpoint.dtype, None, None, None, None, link_weights=False, whole=True)
    if most_have_few_bits(checkpoint.geometry, quantization):
        return None
    head = untrained_draft(checkpoint.geometry, True)
    return outline(checkpoint.path, checkpoint.config, checkpoint.dtype, head, quantization)


def rounded(decoder: Decoder, manifest: Manifest) -> Decoder:
    """Round a decoder's linear weights in place as the draft's are, whose number of inputs allows it."""
    decoder.lm_head.weight = nn.Parameter(decoder.lm_head.weight.clone(), requires_grad=False)  # not the embeddings, if tied
    quantization, dtype = manifest.quantization.draft, getattr(torch, manifest.dtype)
    assert quantization is not None
    for name, weight in decoder.named_parameters():
        if is_linear(name) and weight.ndim == 2 and weight.shape[1] % BLOCK == 0:
            levels = quantize(weight.detach().cpu(), quantization.weights, dtype)
            weight.data.copy_(dequantize(levels, quantization.weights).t())
    return decoder


@torch.no_grad()
def correct_drafts(
    validation: ValidationSet, draft: Decoder, precision: str, device: torch.device, batch: int = 16
) -> list[NDArray[np.bool_]]:
    """For each continuation, whether the draft of token i is token i [1, T]: the model's own greedy choice.

    Args:
        validation: Prompts with continuations.
        draft: The model with rounded weights, on the device.
        precision: As for a :class:`Teacher`.
        device: Of the draft.
        batch: Rows in a pass.
    """
    teacher = Teacher(draft, (), 1, precision)
    passes = [teacher(part.to(device))[1].top_ids[..., 0].cpu() for part in torch.split(validation.tokens, batch)]
    right = (torch.cat(passes)[:, :-1] == validation.tokens[:, 1:]).numpy()
    spans = zip(validation.starts.tolist(), validation.ends.tolist(), strict=True)
    return [right[row : row + 1, start - 1 : end - 1] for row, (start, end) in enumerate(spans)]
