"""Create torch modules with the weights of a checkpoint, and load and save exit heads."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eesd.common.draft_vocab import Ids
from eesd.common.files import written_whole
from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.quantization import LM_HEAD
from eesd.common.weights import DRAFT_VOCAB
from eesd.model.arrays import to_float32
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint, exit_head_tensors, stored_draft_vocab
from eesd.model.decoder import Decoder, ExitHead
from eesd.model.exit_head_file import WEIGHTS_FILE, read_exit_config, save_config
from eesd.model.initial_head import check_exit, initial_names, joined


def load_decoder(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load the whole base model, frozen."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a large model might not fit in memory as float32
    try:
        model = Decoder(checkpoint.geometry).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(default)
    for name, parameter in model.named_parameters():
        parameter.copy_(as_torch(checkpoint.tensors[name].read()))
    return model


def make_initial_head(
    checkpoint: Checkpoint, exit_config: ExitConfig, draft_vocab: Ids | None = None
) -> ExitHead:
    """Create an untrained exit head from the base model's last layers. Only the tensors of these
    layers are read.

    ``draft_vocab`` holds the ids of the draft vocabulary [Vd], ascending.
    """
    geometry = checkpoint.geometry
    check_exit(geometry, exit_config)
    state: dict[str, Tensor] = {}
    for name, sources in initial_names(geometry, exit_config).items():
        parts = [to_float32(checkpoint.tensors[source].read()) for source in sources]
        state[name] = as_torch(joined(name, parts, geometry, exit_config))
    head = ExitHead(geometry, exit_config)
    if draft_vocab is not None:
        ids = state[DRAFT_VOCAB] = as_torch(draft_vocab)
        if exit_config.own_lm_head:
            state[LM_HEAD] = state[LM_HEAD][ids]
    if exit_config.deep:
        state |= _initial_deep(geometry, len(exit_config.deep))
    head.load_state_dict(state)
    return head


def _initial_deep(geometry: Geometry, count: int) -> dict[str, Tensor]:
    """Return the first weights of the deep layers. The projections to the deep state are random.
    The projection back is zero, so that the deep state adds nothing yet."""
    hidden = geometry.hidden_size
    width = geometry.cache_columns
    generator = torch.Generator().manual_seed(0)
    found = {"deep_in_proj.weight": torch.zeros(hidden, width)}
    for index in range(count):
        found[f"deep.{index}.norm.weight"] = torch.ones(hidden)
        if geometry.norm_bias:
            found[f"deep.{index}.norm.bias"] = torch.zeros(hidden)
        found[f"deep.{index}.state_proj.weight"] = (
            torch.randn(width, hidden, generator=generator) / (hidden * count) ** 0.5
        )
    return found


def load_exit_head(checkpoint: Checkpoint, directory: Path) -> ExitHead:
    """Load a model's exit head in float32.

    Raises:
        EESDError: The head is missing or damaged, or was trained for another model.
    """
    geometry = checkpoint.geometry
    exit_config = read_exit_config(directory, checkpoint.fingerprint())
    tensors = exit_head_tensors(geometry, exit_config, directory)
    head = ExitHead(geometry, exit_config)
    state = {name: as_torch(to_float32(tensor.read())) for name, tensor in tensors.items()}
    if exit_config.draft_vocab:
        state[DRAFT_VOCAB] = as_torch(stored_draft_vocab(geometry, exit_config, directory))
    head.load_state_dict(state)
    return head.eval()


def save_exit_head(head: ExitHead, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head into a directory.

    Each file appears complete or not at all. The JSON file is written last, because it makes the
    directory a checkpoint.

    Args:
        head: The exit head.
        directory: Directory to write into. It is created if needed.
        dtype: Element type of the stored weights. The draft vocabulary is stored as int32.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().to(dtype if value.is_floating_point() else torch.int32).contiguous()
        for name, value in head.state_dict().items()
    }
    with written_whole(directory / WEIGHTS_FILE) as temporary:
        save_file(state, temporary)
    save_config(head.exit_config, directory)
