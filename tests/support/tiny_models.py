"""Makes tiny seeded Llama models and their engines. The untrained draft of these models is often
right, but not always."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eesd.common.geometry import ExitConfig
from eesd.common.quantization import BLOCK, SEARCHED_INT4, UNQUANTIZED, Quantization, Quantizations
from eesd.export.cpu.build import build_for_cpu
from eesd.export.engine_dir import export, stored_head, untrained_head, whole_model
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import make_initial_head, save_exit_head
from eesd.runtime.engines import operators
from support.tiny_checkpoints import randomise

EXIT_LAYER = 1


def build(
    directory: Path,
    vocab_size: int,
    layers: int,
    damping: float,
    seed: int,
    tied: bool = False,
    head_dim: int = 8,
    kv_heads: int = 2,
) -> Path:
    """Write a Llama model with random weights.

    The draft consists of layer 0 and a copy of the last layers, so it skips layer 1. The outputs of
    layer 1 are multiplied by ``damping``. If this value is small, the draft is right more often.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        head_dim=head_dim,
    )
    model = LlamaForCausalLM(config)
    randomise(model, seed)
    layer = model.model.layers[min(EXIT_LAYER, layers - 1)]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.mul_(damping)
        layer.mlp.down_proj.weight.mul_(damping)
    model.save_pretrained(directory)
    return directory


def export_tiny(
    model: Path,
    output: Path,
    slots: int,
    tree_nodes: int = 12,
    top_k: int = 4,
    blocks: int = 1,
    layer: int = EXIT_LAYER,
    stages: int = 1,
    dtype: str = "float32",
    own_lm_head: bool = False,
    draft_vocab: Sequence[int] = (),
    whole: bool = False,
) -> Path:
    """Export a model with an exit head that copies its last layers. If the exit head has a separate
    LM head, its weights are the weights of the model's LM head multiplied by two.

    If ``whole`` is true, the draft is the whole model in 4 bits instead of a head.
    """
    checkpoint = Checkpoint(model)
    quantization = UNQUANTIZED
    if whole:
        head = whole_model(checkpoint)
        quantization = Quantizations(
            draft=SEARCHED_INT4 if dtype == "float32" else Quantization("int4", BLOCK)
        )
    elif blocks == 1 and not own_lm_head and not draft_vocab:
        head = untrained_head(checkpoint, layer)
    else:
        config = ExitConfig(
            layer, blocks, own_lm_head, checkpoint.fingerprint(), draft_vocab=len(draft_vocab)
        )
        ids = np.array(draft_vocab) if draft_vocab else None
        made = make_initial_head(checkpoint, config, ids).requires_grad_(False)
        if made.lm_head is not None:
            made.lm_head.weight.mul_(2)
        save_exit_head(made, output.parent / "head", torch.float32)
        head = stored_head(checkpoint, output.parent / "head")
    options = ExportOptions(dtype, slots, tree_nodes, top_k, stages, quantization=quantization)
    manifest = export(checkpoint, head, options, output)
    if not operators.missing():
        build_for_cpu(output, manifest)
    return output
