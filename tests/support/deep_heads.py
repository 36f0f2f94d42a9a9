"""Random exit heads with deep layers."""

from pathlib import Path

import torch

from eesd.common.geometry import ExitConfig
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import ExitHead
from eesd.model.loading import load_exit_head, make_initial_head, save_exit_head
from support.tiny_checkpoints import randomise


def deep_head(checkpoint: Checkpoint, directory: Path, blocks: int = 1) -> ExitHead:
    """A random head after layer 1 that reads the states after all further layers. It is also
    written to ``directory``."""
    deep = tuple(range(2, checkpoint.geometry.num_layers + 1))
    config = ExitConfig(1, blocks, base=checkpoint.fingerprint(), trained=True, deep=deep)
    head = make_initial_head(checkpoint, config).requires_grad_(False)
    randomise(head, seed=4)
    save_exit_head(head, directory, torch.float32)
    return load_exit_head(checkpoint, directory)
