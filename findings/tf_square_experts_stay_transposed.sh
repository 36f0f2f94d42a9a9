#!/usr/bin/env bash
# transformers 5.23.0 (with torch 2.13.0): published experts of Qwen3-VL-MoE are misread if they are square.
#
# Behaviour: published checkpoints of `qwen3_vl_moe` hold their experts transposed, [experts, in, out].
# transformers transposes such a tensor only if its shape does not fit. If `hidden_size` is twice
# `moe_intermediate_size`, `gate_up_proj` is square and fits either way: it is not transposed, and nothing
# warns.
#
# Output seen:
#   moe_intermediate_size 12: gate_up_proj equal after reading: True, down_proj: True
#   moe_intermediate_size 16: gate_up_proj equal after reading: False, down_proj: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def read_again(inner):
    """Whether the experts of a checkpoint in the published layout are read as they were."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": inner,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    directory = f"model-{inner}"
    model.save_pretrained(directory)
    file = f"{directory}/model.safetensors"
    own = {name: value for name, value in model.named_parameters() if ".experts." in name}
    stored = load_file(file)
    for name in stored:
        for kind in ("gate_up_proj", "down_proj"):
            if name.endswith(f"experts.{kind}"):
                [value] = [value for key, value in own.items() if key.endswith(kind)]
                stored[name] = value.detach().transpose(1, 2).contiguous()
    save_file(stored, file, {"format": "pt"})
    again = AutoModelForImageTextToText.from_pretrained(directory)
    return {
        name.split(".")[-1]: torch.equal(value, again.get_parameter(name))
        for name, value in own.items()
    }


for inner, expected in ((12, True), (16, False)):
    equal = read_again(inner)
    print(
        f"moe_intermediate_size {inner}: gate_up_proj equal after reading: {equal['gate_up_proj']}, "
        f"down_proj: {equal['down_proj']}"
    )
    assert equal == {"gate_up_proj": expected, "down_proj": True}, "this has changed"
PYTHON
