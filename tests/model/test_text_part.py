"""The text model of checkpoints that also read images."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_grid import SMALL
from support.tiny_checkpoints import randomise
from transformers import AutoConfig, AutoModelForImageTextToText

from eesd.common.errors import EESDError
from eesd.common.weights import model_shapes
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import load_config
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.loading import load_decoder

SIZES = SMALL | {"intermediate_size": 40, "pad_token_id": None}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"sliding_window": 9}),
    "mistral": ("mistral3", {"model_type": "mistral", "sliding_window": None}),
    "ministral3": (
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": YARN | {"original_max_position_embeddings": 24},
        },
    ),
}
PREFIXES = {
    "published": ("language_model.model.", "language_model.lm_head.", ""),
    "transformers 5": ("model.language_model.", "lm_head.", "model."),
}


def write(directory: Path, name: str, tied: bool) -> Any:
    """Write a tiny checkpoint. Returns transformers' model."""
    model_type, own = TEXTS[name]
    options = {
        "text_config": SIZES | own,
        "vision_config": VISION,
        "image_token_index": 60,
        "tie_word_embeddings": tied,
    }
    if model_type == "gemma3":
        options["mm_tokens_per_image"] = 4
    model: Any = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(model_type, **options), dtype=torch.float32
    )  # type: ignore[no-untyped-call]
    randomise(model, 1)
    model.save_pretrained(directory)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "tied"), [("gemma3", True), ("mistral", False), ("ministral3", True)]
)
def test_the_text_model_has_the_logits_of_the_whole(tmp_path: Path, name: str, tied: bool) -> None:
    """With tensor names of both layouts, and with only the differences from the defaults in
    text_config."""
    model = write(tmp_path, name, tied)
    path = tmp_path / "config.json"
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads(path.read_text())
    if name == "gemma3":
        del config["text_config"]["model_type"]
    path.write_text(json.dumps(config))
    for layer, head, other in PREFIXES.values():
        named = {}
        for key, values in stored.items():
            if "vision_tower" in key or "multi_modal_projector" in key:
                named[other + key.removeprefix("model.")] = values
            elif "lm_head." in key:
                named[head + key.rpartition("lm_head.")[2]] = values
            else:
                named[layer + key.split("language_model.")[-1].removeprefix("model.")] = values
        save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
        checkpoint = Checkpoint(tmp_path)
        assert "the text model alone" in checkpoint.config.notices[-1]
        count = min(40, checkpoint.config.max_positions)
        ids = torch.randint(0, 60, (1, count), generator=torch.Generator().manual_seed(1))
        geometry = checkpoint.geometry
        with torch.no_grad():
            found = load_decoder(checkpoint)(
                ids,
                causal_inputs(geometry, 1, count, count),
                empty_caches(geometry, 1, count, geometry.num_layers),
            )[0]
            expected = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


def test_a_published_config_leaves_most_fields_to_the_defaults(tmp_path: Path) -> None:
    """The config of google/gemma-3-4b-it, from memory."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": VISION,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_config(tmp_path)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))  # type: ignore[no-untyped-call]
    weights = sum(values.numel() for values in model.model.language_model.parameters())
    assert sum(map(prod, model_shapes(found.geometry).values())) == weights
    assert (found.dtype, found.eos_token_ids, found.geometry.window) == ("bfloat16", (1, 106), 1024)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, "text_config is None"),
        (
            {"text_config": {"model_type": "llama"}},
            "the type 'llama'; supported are gemma3_text",
        ),
        ({"architectures": ["Gemma3ForCausalLM"]}, "must be Gemma3ForConditionalGeneration"),
        ({"model_type": "llava"}, "not supported"),
    ],
)
def test_other_parts_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    whole = {"model_type": "gemma3", "text_config": {}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole | change))
    with pytest.raises(EESDError) as refused:
        Checkpoint(tmp_path)
    assert words in str(refused.value)
