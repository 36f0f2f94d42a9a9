"""Tests of the published configurations of well-known checkpoints. They use the full size without
weights, and narrow versions with random weights. Other tests use the text model of checkpoints that
also read images.

``data/published_configs.json`` has one checkpoint per line. A line contains its ``config.json``,
and ModelOpt's ``hf_quant_config.json`` if there is one. ``parameters`` is the number of weights
that the checkpoint's page gives, if it is known. ``source`` says where the values come from: a
public repository that has the file, or memory. Long lists of layers in ``quantization_config`` are
cut.
"""

import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command import slow_but
from support.family_grid import SMALL
from support.tiny_checkpoints import decoder_logits, randomise
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from eesd.common.errors import EESDError
from eesd.common.quantization import FP8
from eesd.common.weights import model_shapes, weight_bytes, weights_of
from eesd.export.memory import estimate_memory
from eesd.export.onnx_graph import ExportOptions, make_graph
from eesd.export.outline import outlined
from eesd.export.predict import GPUS, predict
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import load_config
from eesd.model.families import FAMILIES

IMAGES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data/published_images.json").read_text()
)
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data/published_configs.json").read_text()
)
LEVELS = {
    "Qwen/Qwen3-32B-FP8": (FP8, 128),
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": (FP8, 128),
    "Qwen/Qwen3-30B-A3B-FP8": (FP8, 128),
    "Qwen/Qwen3-235B-A22B-FP8": (FP8, 128),
    "nvidia/Llama-3.1-70B-Instruct-FP8": (FP8, 128),
    "mistralai/Devstral-2-123B-Instruct-2512": (FP8, 128),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": ("uint4", 128),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": ("int4", 128),
    "RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8": ("int8", 32),
}
"""The type of the quantized levels that an export keeps, and the block size."""
MANY = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "granite"),
    *("olmo2", "olmo3", "gemma2", "gemma3_text"),
}
"""The families that have many models."""
TEXT = 40
BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""The fields that have an entry for each layer."""


def write(directory: Path, config: dict[str, Any], entry: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if entry and "hf_quant_config" in entry:
        (directory / "hf_quant_config.json").write_text(json.dumps(entry["hf_quant_config"]))
    return directory


def unquantized(name: str) -> dict[str, Any]:
    return {
        key: value for key, value in CONFIGS[name]["config"].items() if key != "quantization_config"
    }


def parameters(config: dict[str, Any], directory: Path) -> int:
    """Returns the number of weights of the model that transformers makes."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(write(directory, config))
        )  # type: ignore[no-untyped-call]
    stored = ("layer_scalar", "bias")
    buffers = (one for name, one in model.named_buffers() if name.endswith(stored))
    return sum(weight.numel() for weight in (*model.parameters(), *buffers))


def test_every_family_has_its_checkpoints() -> None:
    """There are five checkpoints of each family with many models, and at least one of every other
    family."""
    counts = {
        kind: sum(entry["config"]["model_type"] == kind for entry in CONFIGS.values())
        for kind, family in FAMILIES.items()
        if not family.architecture.endswith("TextModel")  # models for images have these
    }
    assert all(counts.values()), counts
    assert {kind for kind, count in counts.items() if count >= 5} >= MANY
    assert {entry["source"] for entry in CONFIGS.values()} == {"public repository", "memory"}


@pytest.mark.parametrize("name", CONFIGS)
def test_full_size_goes_through_geometry_memory_and_prediction(name: str, tmp_path: Path) -> None:
    entry = CONFIGS[name]
    manifest = outlined(str(write(tmp_path, entry["config"], entry)))
    count = sum(map(prod, model_shapes(manifest.geometry).values()))
    assert count == entry.get("parameters", count)
    quantized = manifest.quantization.layers
    assert (quantized and (quantized.weights, quantized.block)) == LEVELS.get(name)
    has_levels = bool(quantized or manifest.quantization.tensors)
    few_bits = has_levels and (quantized is None or quantized.weights in ("int4", "uint4"))
    [device] = estimate_memory(manifest, 1)
    assert (
        device.verify_weights
        == weight_bytes(manifest, manifest.verify[0])
        > count * (0.4 if has_levels else 1.9)
    )
    found = predict(manifest, GPUS["h200"], manifest.max_seq_len)
    assert (found.draft > 0) == manifest.exit_head.can_draft == (not few_bits)
    assert found.draft < found.verify[0] <= found.verify[-1]
    (tmp_path / "plain").mkdir()
    count -= sum(values.size for values in load_config(tmp_path).values.values())  # not stored
    assert count == parameters(unquantized(name), tmp_path / "plain")


LARGEST = {
    entry["config"]["model_type"]: name for name, entry in CONFIGS.items() if name not in LEVELS
}
"""The name of a checkpoint for each family."""


@pytest.mark.parametrize("family", slow_but([*LARGEST], "llama", "qwen3_moe", "olmo3"))
def test_graphs_of_full_width_have_the_weights_that_memory_is_counted_of(
    family: str, tmp_path: Path
) -> None:
    """The graphs have the first layers of the model, until there is at least one layer of each
    kind."""
    manifest = outlined(str(write(tmp_path, unquantized(LARGEST[family]))))
    whole = manifest.geometry
    layers = (
        max(2, 1 + max(whole.layer_kinds.index(kind) for kind in set(whole.layer_kinds)))
        if whole.layer_kinds
        else 2
    )
    config = unquantized(LARGEST[family]) | {"num_hidden_layers": layers}
    config |= {key: config[key][:layers] for key in BY_LAYER if config.get(key)}
    manifest = outlined(str(write(tmp_path, config)))
    options = ExportOptions(
        manifest.dtype, manifest.max_seq_len, quantization=manifest.quantization
    )
    for name, graph in (("draft", manifest.draft), ("verify", manifest.verify[0])):
        found = make_graph(name, manifest.geometry, manifest.exit_head, options)
        assert {weight.name: weight for weight in found.weights} == weights_of(manifest, graph)


def narrowed(name: str) -> dict[str, Any]:
    """Returns the config with few layers and small sizes. Everything else, including the notation,
    is the same as in the published config."""
    config = unquantized(name)
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    layers = min(config["num_hidden_layers"], 7)
    whole = config.get("head_dim") or config["hidden_size"] // heads
    size = 16
    narrow = min(heads, 4)
    config |= {
        "num_attention_heads": narrow,
        "num_key_value_heads": max(1, narrow * kv_heads // heads),
        "num_hidden_layers": layers,
        "hidden_size": narrow * size,
        "intermediate_size": 48,
        "vocab_size": 61,
        "pad_token_id": None,
        "eos_token_id": 2,
    }
    config |= {"head_dim": size} if "head_dim" in config else {}
    config |= {"moe_intermediate_size": 24} if "moe_intermediate_size" in config else {}
    few = {"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "rotary_dim": size // 2}
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    for key, most in (few | dict.fromkeys(experts, 6)).items():
        config |= {key: min(config[key], most)} if key in config else {}
    config |= {key: config[key][:layers] for key in BY_LAYER if config.get(key)}
    if "kv_lora_rank" in config:
        config |= {"q_lora_rank": config["q_lora_rank"] and 12, "kv_lora_rank": 20}
        config |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
        groups = {"n_group": 2, "topk_group": 1}
        config |= {key: min(config[key], most) for key, most in groups.items() if key in config}
    if "mamba_n_heads" in config:
        inner = config.get("mamba_d_ssm") and 2 * config["hidden_size"]
        config |= {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 12}
        config |= {"mamba_d_ssm": inner} if inner else {}
    if config["model_type"] == "gemma4_text":
        config |= {"vocab_size_per_layer_input": 61, "global_head_dim": 2 * size}
        config |= {
            key: min(config[key], most)
            for key, most in {
                "hidden_size_per_layer_input": 12,
                "num_kv_shared_layers": 2,
                "num_global_key_value_heads": 1,
                "top_k_experts": 2,
            }.items()
            if key in config
        }
    config |= {"sliding_window": 24} if config.get("sliding_window") else {}
    scaling = dict(config.get("rope_scaling") or {})
    step = whole // size
    scaling |= {
        key: scaling[key][::step] for key in ("long_factor", "short_factor") if key in scaling
    }
    return config | ({"rope_scaling": scaling} if scaling else {})


@cache
def distinct() -> list[str]:
    """Returns one checkpoint for each different narrow config. Fields without effect do not
    distinguish configs."""
    kept = (
        "transformers_version",
        "torch_dtype",
        "dtype",
        "bos_token_id",
        "_name_or_path",
        "use_cache",
    )
    texts = {
        name: json.dumps(
            {key: value for key, value in narrowed(name).items() if key not in kept}, sort_keys=True
        )
        for name in CONFIGS
    }
    return list({text: name for name, text in texts.items()}.values())


@torch.no_grad()
@pytest.mark.parametrize("name", distinct())
def test_narrow_models_have_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    config = narrowed(name)
    write(tmp_path, config)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), dtype=torch.float32
    )  # type: ignore[no-untyped-call]
    randomise(model, 0)
    if "mamba_n_heads" in config:
        inner = config.get("mamba_d_ssm") and 2 * config["hidden_size"]
        config |= {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 12}
        config |= {"mamba_d_ssm": inner} if inner else {}
    if config["model_type"] == "gemma4_text":
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.data *= 0.2  # no other factor scales the scores
    elif config["model_type"].startswith(("gemma", "qwen3_5", "qwen3_next")):
        for parameter, values in model.named_parameters():  # stores its norms minus 1
            less = parameter.endswith("norm.weight") and ".linear_attn." not in parameter
            values.data -= float(less)
    model.save_pretrained(tmp_path)
    write(tmp_path, config)  # as it was published, not as transformers writes it today
    assert load_config(tmp_path).geometry.num_layers == config["num_hidden_layers"]
    checkpoint = Checkpoint(tmp_path)
    count = min(TEXT, checkpoint.config.max_positions)
    ids = torch.randint(
        0, config["vocab_size"], (1, count), generator=torch.Generator().manual_seed(1)
    )
    expected = model.eval()(ids).logits[0]
    found = decoder_logits(checkpoint, ids)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


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
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
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
    "qwen2_vl": ("qwen2_vl", MROPE),
    "qwen2_5_vl": ("qwen2_5_vl", MROPE),
    "qwen3_vl": ("qwen3_vl", MROPE | {"head_dim": 16}),
    "qwen3_vl_moe": ("qwen3_vl_moe", MROPE | MIXED | {"moe_intermediate_size": 12}),
    "square": ("qwen3_vl_moe", MROPE | MIXED),  # gate and up have the shape of their transpose
    "qwen3_5": ("qwen3_5", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe", DELTA | EXPERTS),
}
OTHER_PARTS = ("vision_tower", "multi_modal_projector", "visual.")
PREFIXES = {
    "published": ("language_model.model.", "language_model.lm_head.", ""),
    "transformers 5": ("model.language_model.", "lm_head.", "model."),
    "Qwen2-VL": ("model.", "lm_head.", ""),
}


def write_images(directory: Path, name: str, tied: bool) -> Any:
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
    if model_type.startswith("qwen"):
        own_vision = {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
        options["vision_config"] = VISION | own_vision | {"num_position_embeddings": 16}
        special = ("image_token_id", "video_token_id", "vision_start_token_id")
        options |= dict(zip((*special, "vision_end_token_id"), range(56, 60), strict=True))
        options["text_config"] = SIZES | own | {"tie_word_embeddings": tied}
    model: Any = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(model_type, **options), dtype=torch.float32
    )  # type: ignore[no-untyped-call]
    randomise(model, 1)
    model.save_pretrained(directory)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("gemma3", True),
        ("mistral", False),
        ("ministral3", True),
        ("qwen2_vl", True),
        ("qwen2_5_vl", False),
        ("qwen3_vl", True),
        ("qwen3_vl_moe", False),
        ("square", True),
        ("qwen3_5", True),
        ("qwen3_5_moe", False),
    ],
)
def test_the_text_model_has_the_logits_of_the_whole(tmp_path: Path, name: str, tied: bool) -> None:
    """The logits are equal for the tensor names of both layouts. They are also equal if the
    text_config has only the fields that differ from the defaults."""
    model = write_images(tmp_path, name, tied)
    path = tmp_path / "config.json"
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads(path.read_text())
    if name == "gemma3":
        del config["text_config"]["model_type"]
    path.write_text(json.dumps(config))
    for layer, head, other in PREFIXES.values():
        named = {}
        for key, values in stored.items():
            if any(part in key for part in OTHER_PARTS):
                named[other + key.removeprefix("model.")] = values
            elif "lm_head." in key:
                named[head + key.rpartition("lm_head.")[2]] = values
            else:
                named[layer + key.split("language_model.")[-1].removeprefix("model.")] = values
        save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
        checkpoint = Checkpoint(tmp_path)
        assert "the text model alone" in checkpoint.config.notices[-1]
        count = min(40, checkpoint.config.max_positions)
        ids = torch.randint(0, 56, (1, count), generator=torch.Generator().manual_seed(1))
        found = decoder_logits(checkpoint, ids)
        with torch.no_grad():
            expected = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", IMAGES)
def test_published_models_for_images_have_the_text_models_weights(
    tmp_path: Path, name: str
) -> None:
    """Some of these configs leave most fields to the defaults. All are written from memory."""
    config = IMAGES[name]
    found = load_config(write(tmp_path, config))
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))  # type: ignore[no-untyped-call]
    weights = [*model.model.language_model.parameters()]
    if not found.geometry.tied_embeddings:
        weights.append(model.lm_head.weight)
    tied = model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert tied == found.geometry.tied_embeddings
    count = sum(map(prod, model_shapes(found.geometry).values()))
    assert count == sum(values.numel() for values in weights)
    assert found.dtype == "bfloat16" and found.eos_token_ids
    assert not any("unknown" in notice for notice in found.notices)


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
