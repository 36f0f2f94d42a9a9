"""Tests of GGUF files of families that transformers cannot read. The transformers model of a test
gets the tensors that the gguf library reads, by the names that llama.cpp's converter writes."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support import gguf_files
from support.gguf_files import EXPERTS, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCABULARY, Spec
from transformers import AutoConfig, AutoModelForCausalLM

from eesd.common.errors import EESDError
from eesd.model.checkpoint import Checkpoint
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.loading import load_decoder

PROMPT = [0, 40, 77, 5, 210, 99, 33]
SHARED = 96
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def of_blocks(**tensors: Any) -> dict[str, Any]:
    """The tensors to add to each block. A tensor is removed if its value is None."""
    return {
        f"blk.{layer}.{name.replace('__', '.')}": values
        for layer in range(LAYERS)
        for name, values in tensors.items()
    }


def floats(*shape: int) -> Any:
    random = np.random.default_rng(sum(shape))
    return random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)


def cohere(name: str, **more: Any) -> Spec:
    """The file is as the converter writes it, without rotary scaling and LayerNorms with biases."""
    own: dict[str, Any] = {"attention.layer_norm_rms_epsilon": None}
    own["attention.layer_norm_epsilon"] = 1e-3
    own |= {"logit_scale": 0.3, "rope.scaling.type": "none", "rope.dimension_count": 64} | more
    metadata = {f"{name}.{key}": value for key, value in own.items()}
    return Spec(name, tied=True, metadata=metadata, tensors=of_blocks(ffn_norm__weight=None))


def qwen2moe(gate: tuple[int, ...], kind: str = "F32") -> Spec:
    lengths = {
        "qwen2moe.expert_feed_forward_length": INNER,
        "qwen2moe.expert_shared_feed_forward_length": SHARED,
    }
    tensors = of_blocks(
        attn_output__bias=None,
        ffn_gate_inp_shexp__weight=floats(*gate),
        ffn_gate_shexp__weight=floats(SHARED, HIDDEN),
        ffn_up_shexp__weight=floats(SHARED, HIDDEN),
        ffn_down_shexp__weight=floats(HIDDEN, SHARED),
    )
    return Spec(
        "qwen2moe",
        kind,
        biases=True,
        experts="together",
        metadata=lengths,
        tensors=tensors,
    )


def apertus(**more: Any) -> Spec:
    """Returns a file of Apertus, with the numbers of xIELU in its metadata. ``more`` adds or
    replaces metadata."""
    tensors = of_blocks(
        ffn_gate__weight=None,
        attn_q_norm__weight=floats(HIDDEN // HEADS) + 1,
        attn_k_norm__weight=floats(HIDDEN // HEADS) + 1,
    )
    numbers = {f"xielu.{name}": values for name, values in XIELU.items()}
    return Spec("apertus", metadata=numbers | more, tensors=tensors)


XIELU = {
    "alpha_p": [0.5, 0.7, -0.25],
    "alpha_n": [0.125, -0.5, 1.0],
    "beta": [0.5, 0.5, 0.5],
    "eps": [-1e-6, -1e-6, -1e-6],
}
SECTIONS = [8, 12, 12, 0]


def qwen3vl(name: str, **more: Any) -> Spec:
    """A file with the metadata of images, which have no effect on a text."""
    norm = floats(HIDDEN // HEADS) + 1
    tensors = of_blocks(attn_q_norm__weight=norm, attn_k_norm__weight=norm)
    own = {"rope.dimension_sections": SECTIONS, "n_deepstack_layers": 3} | more
    metadata = {f"{name}.{key}": value for key, value in own.items()}
    return Spec(name, experts="together" if more else "", metadata=metadata, tensors=tensors)


SPECS = {
    "qwen2vl": Spec(
        "qwen2vl",
        biases=True,
        metadata={"qwen2vl.rope.dimension_sections": SECTIONS},
        tensors=of_blocks(attn_output__bias=None),
    ),
    "qwen3vl": qwen3vl("qwen3vl"),
    "qwen3vlmoe": qwen3vl("qwen3vlmoe", expert_feed_forward_length=INNER),
    "command-r": cohere("command-r"),
    "cohere2": cohere("cohere2", **{"attention.sliding_window": 4}),
    "qwen2moe": qwen2moe((HIDDEN,)),
    "qwen2moe, a matrix of one row": qwen2moe((1, HIDDEN)),
    "qwen2moe, levels": qwen2moe((HIDDEN,), "Q4_0"),
    "apertus": apertus(),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "command-r": {"model_type": "cohere", "logit_scale": 0.3, "layer_norm_eps": 1e-3},
    "cohere2": {
        "model_type": "cohere2",
        "logit_scale": 0.3,
        "layer_norm_eps": 1e-3,
        "sliding_window": 4,
        "layer_types": ["sliding_attention"] * LAYERS,
    },
    "qwen2moe": {
        "model_type": "qwen2_moe",
        "rms_norm_eps": 1e-3,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": SHARED,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "qwen2vl": {"model_type": "qwen2", "rms_norm_eps": 1e-3},
    "qwen3vl": {"model_type": "qwen3", "rms_norm_eps": 1e-3, "head_dim": HIDDEN // HEADS},
    "qwen3vlmoe": {
        "model_type": "qwen3_moe",
        "rms_norm_eps": 1e-3,
        "head_dim": HIDDEN // HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
    },
    "apertus": {"model_type": "apertus", "rms_norm_eps": 1e-3, "hidden_act": "xielu"},
}
"""The transformers config fields for each architecture of a file."""


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file under the names that transformers uses."""
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        module, _, kind = tensor.name.rpartition(".")
        if not module.startswith("blk."):
            names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
            state[f"{names.get(module, 'lm_head')}.{kind}"] = values
            continue
        _, layer, own = module.split(".")
        name = NAMES.get(own, f"mlp.experts.{own}")
        if path.stem == "apertus":
            name = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}.get(
                own, name
            )
        if name == "mlp.shared_expert_gate":
            values = values.reshape(1, -1)
        state[f"model.layers.{layer}.{name}.{kind}"] = values
    for number in range(LAYERS):
        experts = f"model.layers.{number}.mlp.experts."
        if f"{experts}ffn_gate_exps.weight" in state:
            gate, up, down = (
                state.pop(f"{experts}ffn_{part}_exps.weight") for part in ("gate", "up", "down")
            )
            state[f"{experts}gate_up_proj"] = torch.cat((gate, up), 1)
            state[f"{experts}down_proj"] = down
        for name, row in XIELU.items() if path.stem == "apertus" else ():
            state[f"model.layers.{number}.mlp.act_fn.{name}"] = torch.tensor([row[number]])
    return state


@pytest.mark.parametrize("name", SPECS)
def test_a_file_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    path = gguf_files.write(tmp_path / f"{SPECS[name].architecture}.gguf", SPECS[name])
    config: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    reference: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config | CONFIGS[name.partition(",")[0]]),
        experts_implementation="eager",
    )  # type: ignore[no-untyped-call]
    missing, unexpected = reference.load_state_dict(state_of(path), strict=False)
    assert not unexpected and {*missing} <= {"lm_head.weight"}
    reference.tie_weights()
    checkpoint = Checkpoint(path)
    count = len(PROMPT)
    inputs = causal_inputs(checkpoint.geometry, 1, count, count)
    caches = empty_caches(checkpoint.geometry, 1, count)
    with torch.no_grad():
        found = load_decoder(checkpoint)(torch.tensor([PROMPT]), inputs, caches)[0]
        expected = reference.eval()(torch.tensor([PROMPT])).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"xielu.beta": [0.5, 0.5, 0.7]}, "xielu.beta must be 0.5"),
        ({"xielu.alpha_p": [0.5, 0.5]}, "xielu.alpha_p must have a number for each"),
        ({"xielu.alpha_n": None}, "xielu.alpha_n"),
        ({"xielu.eps": 1.0}, "xielu.eps must have a number for each"),
    ],
)
def test_other_numbers_of_xielu_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", apertus(**change))
    with pytest.raises(EESDError, match=words):
        Checkpoint(path)


def test_norms_of_queries_and_keys_of_command_r_are_refused(tmp_path: Path) -> None:
    """The weights of these norms differ between heads."""
    norm = np.ones((HEADS, HIDDEN // HEADS), np.float32)
    spec = cohere("command-r")
    tensors = dict(spec.tensors) | of_blocks(attn_q_norm__weight=norm)
    path = gguf_files.write(
        tmp_path / "model.gguf",
        Spec("command-r", tied=True, metadata=spec.metadata, tensors=tensors),
    )
    with pytest.raises(EESDError, match="q_norm"):
        Checkpoint(path)
