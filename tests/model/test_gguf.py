"""Tests that a model in one or several GGUF files gives the weights, tokens and token ids that
transformers reads from them. Other files are refused, and the error gives the reason.

Texts end where llama.cpp ends them, and tokens that a file marks as text remain text.
"""

import json
import shutil
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import load, numpy_helper
from support import gguf_files
from support.command import assert_refused, export_engine, run, slow_but, succeed
from support.engine_dirs import assert_weights_match_manifest, logits_of
from support.gguf_files import (
    EXPERTS,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    SPECIAL,
    VOCABULARY,
    Spec,
    write_metadata,
)
from support.tiny_checkpoints import decoder_logits
from support.without_operators import float32_activations
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
)

import eesd
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.common.quantization import (
    DRAFT,
    EXIT_HEAD,
    LM_HEAD,
    MXFP4,
    UNQUANTIZED,
    parts_of,
)
from eesd.common.weights import EMBEDDINGS, MINIMUMS, SCALES, weights_of
from eesd.export.cache import place_of
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.model.checkpoint import Checkpoint
from eesd.model.families import FAMILIES
from eesd.model.fields import Fields
from eesd.model.gguf_file import OWN_LEVELS, GgufTensor, read_gguf
from eesd.model.gguf_special import end_tokens
from eesd.model.gguf_tokenizer import gguf_tokenizer
from eesd.model.loading import load_decoder
from eesd.model.quantized import dequantize
from eesd.model.tokenizer_files import resolved_tokenizer
from eesd.runtime.llm import Speculation
from eesd.runtime.text import TextCodec, TextStream
from eesd.serve.grammar.fill_in import ends_between

PROMPT = [0, 40, 77, 5, 210, 99, 33]
PROMPTS = torch.tensor([PROMPT])
ARCHITECTURES = {
    "llama": Spec("llama"),
    "llama-tied": Spec("llama", tied=True),
    "qwen2": Spec("qwen2", biases=True),
    "qwen2-tied": Spec("qwen2", biases=True, tied=True, table="F16"),
    "qwen3": Spec("qwen3", head_dim=128),
}
QUANTIZED = tuple(kind for kind, one in OWN_LEVELS.items() if one.integers)
TYPES = ("F16", "BF16", *QUANTIZED)


def transformers_reads(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def save(reference: Any, directory: Path) -> Path:
    """Save the model that transformers read from a GGUF file as a model directory."""
    reference.hf_quantizer = None
    if hasattr(reference.config, "quantization_config"):
        del reference.config.quantization_config
    reference.save_pretrained(directory)
    return directory


def assert_same_as_transformers(path: Path) -> None:
    """Check that every weight has the same bits, and that the logits are equal, which shows that
    the options are the same."""
    checkpoint = Checkpoint(path)
    reference = transformers_reads(path)
    expected = reference.state_dict()
    for name, parameter in load_decoder(checkpoint).named_parameters():
        assert torch.equal(parameter, expected[name]), name
    with torch.no_grad():
        torch.testing.assert_close(
            decoder_logits(checkpoint, PROMPTS),
            reference(PROMPTS).logits,
            rtol=1e-4,
            atol=2e-4,
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(tmp_path: Path, name: str) -> None:
    assert_same_as_transformers(gguf_files.write(tmp_path / "model.gguf", ARCHITECTURES[name]))


PADDING = {"tokenizer.ggml.padding_token_id": 0}  # Phi-3's default exceeds this vocabulary
OTHER_FAMILIES = {
    "phi3": Spec(
        "phi3",
        metadata=PADDING | {"phi3.rope.dimension_count": 64, "phi3.attention.sliding_window": 0},
    ),
    "phi3-Q4_0": Spec("phi3", "Q4_0", "Q8_0", metadata=PADDING),
    "qwen3moe": Spec("qwen3moe", head_dim=32),
    "qwen3moe-Q4_0": Spec("qwen3moe", "Q4_0", "Q8_0", types={"blk.1.ffn_up_exps.weight": "Q5_1"}),
    "lfm2": Spec("lfm2", tied=True),
    "lfm2-Q4_0": Spec("lfm2", "Q4_0", "Q8_0", tied=True),
    "gemma2": Spec(
        "gemma2", head_dim=256, tied=True, metadata={"gemma2.attention.sliding_window": 4}
    ),
    "gemma3": Spec(
        "gemma3", head_dim=256, tied=True, metadata={"gemma3.attention.sliding_window": 4}
    ),
}
"""transformers reads gemma's files only with the published head size."""


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_families_with_parts_of_their_own(tmp_path: Path, name: str) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", OTHER_FAMILIES[name])
    with torch.no_grad():
        expected = transformers_reads(path)(PROMPTS).logits
    torch.testing.assert_close(
        decoder_logits(Checkpoint(path), PROMPTS), expected, rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize("experts", ["together", "apart"])
def test_mixtral_is_a_llama_with_experts(tmp_path: Path, experts: str) -> None:
    """transformers does not read Mixtral from GGUF files, so its model gets the tensors that the
    gguf library reads."""
    path = gguf_files.write(tmp_path / "model.gguf", Spec("llama", "Q4_0", "Q8_0", experts=experts))
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    } | {
        f"blk.{layer}.{own}": f"model.layers.{layer}.{name}"
        for layer in range(LAYERS)
        for own, name in {
            **{f"attn_{part}": f"self_attn.{part[0]}_proj" for part in ("q", "k", "v", "output")},
            **{
                "attn_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.gate",
            },
        }.items()
    }
    state = {}
    parts = dict[str, Any]()
    for tensor in gguf.GGUFReader(path).tensors:
        module = tensor.name.removesuffix(".weight")
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if module.endswith(("attn_q", "attn_k")):
            values = values.reshape(-1, 32, 2, HIDDEN).swapaxes(1, 2).reshape(-1, HIDDEN)
        if module in names:
            state[f"{names[module]}.weight"] = torch.tensor(values)
        else:
            parts[module] = values
    for layer in range(LAYERS):
        gate, up, down = (
            parts[f"blk.{layer}.ffn_{part}_exps"]
            if experts == "together"
            else np.stack([parts[f"blk.{layer}.ffn_{part}.{expert}"] for expert in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        own = f"model.layers.{layer}.mlp.experts"
        state[f"{own}.gate_up_proj"] = torch.from_numpy(np.concatenate((gate, up), 1))
        state[f"{own}.down_proj"] = torch.tensor(down)
    config = MixtralConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-3,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    reference: Any = MixtralForCausalLM(config)
    reference.load_state_dict(state)
    with torch.no_grad():
        expected = reference.eval()(PROMPTS).logits
    torch.testing.assert_close(
        decoder_logits(Checkpoint(path), PROMPTS), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "name", ["gemma", "seed_oss", "arcee", "stablelm", "nemotron", "jais2", "starcoder2"]
)
def test_architectures_that_transformers_does_not_read(tmp_path: Path, name: str) -> None:
    """The file and the same model as a directory have equal logits."""
    size = 64 if name in gguf_files.LAYER_NORMS else 128
    tied = name in ("gemma", "starcoder2")
    spec = Spec(name, head_dim=size, tied=tied, biases=name == "seed_oss")
    path = gguf_files.write(tmp_path / "model.gguf", spec)
    checkpoint = Checkpoint(path)
    config: dict[str, Any] = {
        "model_type": name,
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": size,
        FAMILIES[name].eps_name: 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    if name in gguf_files.LAYER_NORMS:
        config["rope_parameters"]["partial_rotary_factor"] = 1.0
        biases = ("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias")
        config |= dict.fromkeys(biases, False)
    reference: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))  # type: ignore[no-untyped-call]
    weights: dict[str, torch.Tensor] = dict(load_decoder(checkpoint).named_parameters())
    if name in ("gemma", "nemotron"):  # transformers stores its norms minus 1
        weights = {
            key: value - float(key.endswith("norm.weight")) for key, value in weights.items()
        }
    if name == "starcoder2":
        parts = {"up_proj": "c_fc", "down_proj": "c_proj"}
        for old, new in parts.items():
            weights = {key.replace(old, new): value for key, value in weights.items()}
    reference.load_state_dict(weights, strict=False)
    with torch.no_grad():
        expected = reference.eval()(PROMPTS).logits
    torch.testing.assert_close(decoder_logits(checkpoint, PROMPTS), expected, rtol=1e-4, atol=2e-4)


def test_gpt_oss_with_the_levels_of_its_experts(tmp_path: Path) -> None:
    types = {
        f"blk.{layer}.ffn_{part}_exps.weight": "MXFP4"
        for layer in range(LAYERS)
        for part in ("gate", "up", "down")
    }
    spec = Spec("gpt-oss", head_dim=128, biases=True, experts="together", types=types)
    path = gguf_files.write(tmp_path / "model.gguf", spec)
    checkpoint = Checkpoint(path)
    stored = next(one for one in gguf.GGUFReader(path).tensors if one.name in types)
    values = gguf.dequantize(stored.data, stored.tensor_type)
    part = stored.name.split("_")[1]
    name = f"model.layers.0.mlp.experts.2.{part}_proj.weight"
    assert np.array_equal(checkpoint.tensors[name].read(), values[2])
    assert checkpoint.own_levels[name] == MXFP4
    config: dict[str, Any] = {
        "model_type": "gpt_oss",
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "head_dim": 128,
        "sliding_window": 4,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    reference: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), experts_implementation="eager"
    )  # type: ignore[no-untyped-call]
    reference.load_state_dict(_as_gpt_oss(dict(load_decoder(checkpoint).named_parameters())))
    with torch.no_grad():
        expected = reference.eval()(PROMPTS).logits
    torch.testing.assert_close(decoder_logits(checkpoint, PROMPTS), expected, rtol=1e-4, atol=2e-4)


def _as_gpt_oss(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the decoder's weights under the names that transformers uses. The weights of all
    experts are joined."""
    found: dict[str, torch.Tensor] = {}
    for name, values in weights.items():
        name = name.replace(".mlp.gate.", ".mlp.router.").replace(".sinks.weight", ".sinks")
        before, is_of_one, rest = name.partition(".mlp.experts.0.")
        if not is_of_one:
            if ".mlp.experts." not in name:
                found[name] = values
            continue
        module, kind = rest.split(".")
        other = {"gate_proj": "up_proj"}.get(module)
        if module == "up_proj":
            continue

        def stacked(module: str, kind: str = kind, before: str = before) -> torch.Tensor:
            names = (f"{before}.mlp.experts.{expert}.{module}.{kind}" for expert in range(EXPERTS))
            parts = [weights[one] for one in names]
            return torch.stack([part.T if kind == "weight" else part for part in parts])

        whole = stacked(module)
        if other:  # columns of gate and up alternate
            whole = torch.stack((whole, stacked(other)), -1).flatten(-2)
            module = "gate_up_proj"
        suffix = "" if kind == "weight" else "_bias"
        found[f"{before}.mlp.experts.{module}{suffix}"] = whole
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_types(tmp_path: Path, kind: str) -> None:
    table = "Q8_0" if kind == "BF16" else kind
    assert_same_as_transformers(
        gguf_files.write(tmp_path / "model.gguf", Spec(matrices=kind, table=table))
    )


def test_fingerprint_is_that_of_a_directory_with_the_same_values(tmp_path: Path) -> None:
    """For this reason, an exit head that was trained for the file also fits the directory."""
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices="Q4_0", table="Q8_0"))
    directory = save(transformers_reads(path), tmp_path / "directory")
    assert Checkpoint(path).fingerprint() == Checkpoint(directory).fingerprint()


def test_options_that_transformers_does_not_read(tmp_path: Path) -> None:
    """Biases of llama, and a head size of qwen3 other than 128, are taken from the file."""
    path = gguf_files.write(tmp_path / "biases.gguf", Spec("llama", biases=True, head_dim=32))
    checkpoint = Checkpoint(path)
    assert (
        checkpoint.geometry.qkv_bias
        and checkpoint.geometry.output_bias
        and checkpoint.geometry.head_dim == 32
    )
    stored = gguf.GGUFReader(path).tensors
    bias = next(tensor.data for tensor in stored if tensor.name == "blk.0.attn_k.bias")
    found = checkpoint.tensors["model.layers.0.self_attn.k_proj.bias"].read()
    # The first head has the first value of each pair, followed by the second value of each pair.
    np.testing.assert_array_equal(found[:16], bias[:32:2])
    np.testing.assert_array_equal(found[16:32], bias[1:32:2])
    assert (
        Checkpoint(
            gguf_files.write(tmp_path / "qwen3.gguf", Spec("qwen3", head_dim=32))
        ).geometry.head_dim
        == 32
    )


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def llama3_divisors(factor: float, head_dim: int, theta: float) -> Any:
    """The divisors that llama.cpp's converter writes."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    waves = 2 * np.pi / frequencies
    divisors = []
    for wave in waves:
        smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(factor if wave > 8192 else between)
        if wave < 8192 / 4:
            divisors[-1] = 1.0
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("metadata", "tensors", "scaling"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope.scale_linear": 2.0}, {}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {}, None),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            {},
            YARN | {"original_max_position_embeddings": 64},
        ),
        (
            {"rope.freq_base": 500000.0},
            {"rope_freqs.weight": llama3_divisors(8.0, 64, 500000.0)},
            LLAMA3 | {"original_max_position_embeddings": 8192},
        ),
    ],
)
def test_rope_scaling_is_that_of_the_file(
    tmp_path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, Any],
    scaling: dict[str, Any] | None,
) -> None:
    """transformers ignores the scaling in GGUF files, so the reference is a directory whose
    config.json has it."""
    named = {f"llama.{key}": value for key, value in metadata.items()}
    path = gguf_files.write(tmp_path / "model.gguf", Spec(metadata=named, tensors=tensors))
    reference = transformers_reads(path)
    if scaling is not None:
        reference.config.rope_parameters = scaling | {
            "rope_theta": reference.config.rope_parameters["rope_theta"]
        }
    ours = Checkpoint(path).config
    expected = Checkpoint(save(reference, tmp_path / "directory")).config
    assert ours.geometry == expected.geometry and ours.max_positions == expected.max_positions
    assert (ours.geometry.rope_scaling is None) == (scaling is None)


def stored_weights(directory: Path) -> dict[str, Any]:
    """Returns every weight of the graphs, computed in float32 as the format defines it. Linear
    weights are [out, in]."""
    found: dict[str, Any] = {}
    weights = {}
    for graph in ("draft", "verify"):
        found |= {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in load(directory / f"{graph}.onnx").graph.initializer
        }
    for name in [name for name in found if name + SCALES in found]:
        axis = 1 if name == EMBEDDINGS else 0
        block = found[name].shape[axis] // found[name + SCALES].shape[axis]
        wide = {
            suffix: found.get(name + suffix, np.zeros(())).astype(np.float32)
            for suffix in ("", SCALES, MINIMUMS)
        }
        scales, minimums = (
            np.repeat(part, block, axis) if part.ndim else part
            for part in (wide[SCALES], wide[MINIMUMS])
        )
        values = wide[""] * scales + minimums
        weights[name] = values if axis else values.T
    return weights


SIZES = ("--max-seq-len", 64, "--max-tree-nodes", 4)
MIXED = {
    "token_embd.weight": "Q6_K",
    "output.weight": "Q8_0",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.1.attn_k.weight": "F16",
    "blk.2.ffn_up.weight": "Q5_1",
    "blk.2.ffn_down.weight": "F32",
}
KEPT = {
    **{
        kind: Spec(
            "qwen2" if number % 2 else "llama",
            kind,
            kind,
            tied=number % 3 > 0,
            biases=number % 2 > 0,
        )
        for number, kind in enumerate(QUANTIZED)
    },
    "mixed": Spec("llama", "Q4_K", types=MIXED),
    "mixed-biases": Spec("qwen2", "Q3_K", biases=True, types=MIXED),
    "mixtral": Spec(
        "llama", "Q4_K", experts="together", types={"blk.1.ffn_down_exps.weight": "Q6_K"}
    ),
}


@pytest.mark.parametrize(
    "name", slow_but(list(KEPT), "Q4_0", "Q4_1", "Q4_K", "mixed", "mixed-biases", "mixtral")
)
def test_an_export_keeps_the_levels_of_the_file(tmp_path: Path, name: str) -> None:
    """The dequantized weights equal, bit for bit, the weights that the gguf library dequantizes.
    Every backend decodes the same tokens."""
    path = gguf_files.write(tmp_path / "model.gguf", KEPT[name])
    directory = export_engine(path, tmp_path / "kept", *SIZES, "--check")
    plain = export_engine(
        path, tmp_path / "plain", *SIZES, "--quantize", "none", "--quantize-draft", "none"
    )
    checkpoint = Checkpoint(path)
    manifest = load_manifest(directory)
    assert_weights_match_manifest(directory)
    assert manifest.quantization.tensors == checkpoint.own_levels
    weights = stored_weights(directory)
    seen = set()
    assert (
        not any(weight.startswith(DRAFT) and DRAFT + EXIT_HEAD not in weight for weight in weights)
        or "mixed" in name
    )
    for weight, values in weights.items():
        if not weight.startswith((DRAFT, EXIT_HEAD)):
            parts = [checkpoint.tensors[part].read() for part in parts_of(weight)]
            np.testing.assert_array_equal(values, np.concatenate(parts), weight)
            seen |= set(parts_of(weight))
    assert seen == checkpoint.own_levels.keys()
    assert (LM_HEAD in seen) != checkpoint.geometry.tied_embeddings
    expected = logits_of(plain, "ort")[:2]
    for backend in ("ort", "torch"):
        for found, wanted in zip(
            logits_of(directory, backend, float32_activations(backend))[:2], expected, strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    tokens = set()
    for backend, speculation in product(
        ("ort", "torch"), (None, Speculation("fixed:k=3", guard=False))
    ):
        activations = float32_activations(backend)
        llm = eesd.load(
            directory, backend, speculation=speculation, threads=1, activations=activations
        )
        tokens.add(tuple(llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True).tokens))
    assert len(tokens) == 1


@pytest.mark.parametrize("kind", QUANTIZED)
def test_levels_are_those_of_the_definition(tmp_path: Path, kind: str) -> None:
    """The levels are right for any bytes of the scales and minimums. In K-quants, these have 4 to 8
    bits."""
    checkpoint = Checkpoint(
        gguf_files.write(tmp_path / "model.gguf", Spec(matrices=kind, table=kind), seed=3)
    )
    for name, own in checkpoint.own_levels.items():
        tensor = checkpoint.tensors[name]
        transposed = name != EMBEDDINGS
        assert isinstance(tensor, GgufTensor)
        levels = tensor.levels(own, transposed)
        assert levels is not None
        values = dequantize(levels, own.weights, 0 if transposed else 1)
        np.testing.assert_array_equal(values.T if transposed else values, tensor.read(), name)


def test_layers_that_are_quantized_differently_stay_apart(tmp_path: Path) -> None:
    """Keys and values are not packed without the queries. Stages have the weights in the
    manifest."""
    path = gguf_files.write(tmp_path / "model.gguf", KEPT["mixed-biases"])
    directory = export_engine(path, tmp_path / "plans", *SIZES, "--stages", 2, "--check")
    manifest = load_manifest(directory)
    names = {
        name
        for graph in manifest.verify
        for name in weights_of(manifest, graph)
        if name.startswith("model.layers")
    }
    products = {
        name.removeprefix("model.layers.") for name in names if name.endswith("_proj.weight")
    }
    apart = {f"{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkv"}
    assert (
        apart | {"2.self_attn.qkv_proj.weight", "0.mlp.gate_up_proj.weight", "2.mlp.up_proj.weight"}
        <= products
    )
    assert (
        "0.self_attn.kv_proj.weight" not in products and "2.mlp.gate_up_proj.weight" not in products
    )
    assert_weights_match_manifest(directory)


def test_damaged_scales_are_refused(tmp_path: Path) -> None:
    for number, (kind, at) in enumerate((("Q4_0", 0), ("Q4_1", 2), ("Q4_K", 2), ("Q6_K", 208))):
        path = gguf_files.write(tmp_path / f"{number}.gguf", Spec(matrices=kind))
        entry = next(
            tensor
            for tensor in gguf.GGUFReader(path).tensors
            if tensor.name == "blk.1.ffn_up.weight"
        )
        data = bytearray(path.read_bytes())
        data[entry.data_offset + at : entry.data_offset + at + 2] = np.float16(np.inf).tobytes()
        path.write_bytes(data)
        result = run(
            export_main, "--model", path, "--exit-layer", 1, "-o", tmp_path / "plans", "--no-check"
        )
        assert_refused(
            result, f"{number}.gguf", "blk.1.ffn_up.weight", "scales or minimums", "fetch"
        )
        assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--quantize", "keep", "--dtype", "float16"), ("keep", "float16", "--dtype float32")),
        (("--quantize", "keep", "--link-weights"), ("--link-weights", "keep")),
        (("--quantize", "keep", "--quantize-head", "int8"), ("keep", "--quantize-head")),
        (("--quantize-head", "int8"), ("keep", "--quantize-head")),
    ],
)
def test_levels_that_cannot_be_kept_are_refused(
    tmp_path: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices="Q4_1"))
    assert_refused(
        run(export_main, "--model", path, "--exit-layer", 1, "-o", tmp_path / "plans", *options),
        *words,
    )


def test_a_file_of_floats_has_no_levels_to_keep(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices="F16"))
    options = ("--model", path, "--exit-layer", 1, "-o", tmp_path / "plans", *SIZES, "--no-check")
    assert_refused(run(export_main, *options, "--quantize", "keep"), "keep", "leave the option out")
    succeed(export_main, *options)
    assert load_manifest(tmp_path / "plans").quantization.tensors == {}


def test_sixteen_bit_engines_have_weights_of_sixteen_bits(tmp_path: Path) -> None:
    """TensorRT can build plans from engines with 16-bit weights."""
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices="Q4_1"))
    directory = export_engine(path, tmp_path / "plans", *SIZES, "--dtype", "float16")
    assert load_manifest(directory).quantization == UNQUANTIZED


@pytest.mark.parametrize(("kind", "option"), [("Q4_1", "int4"), ("Q8_0", "int8")])
def test_quantizing_again_finds_levels_over_the_same_range(
    tmp_path: Path, kind: str, option: str
) -> None:
    """The stored levels and scales give the values of the file. A notice says that this does not
    hold for all files."""
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices=kind))
    options = ("--quantize", option, "--quantize-head", "none", *SIZES, "--check")
    result = succeed(
        export_main, "--model", path, "--exit-layer", 1, "-o", tmp_path / "plans", *options
    )
    assert "logits change by 0.0%" in result.stdout and "--quantize keep" in result.stderr
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(
        stored_weights(tmp_path / "plans")[name], Checkpoint(path).tensors[name].read()
    )


def test_an_export_generates_the_tokens_of_transformers(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices="Q4_K", table="Q6_K", tied=True))
    directory = export_engine(path, tmp_path / "plans", "--max-seq-len", 64)
    llm = eesd.load(directory, "ort", threads=1, activations=float32_activations("ort"))
    reference = transformers_reads(path).generate(
        PROMPTS, max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    generated = llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert list(generated.tokens) == reference[0, len(PROMPT) :].tolist()


TEXTS = ["the quick the", " x12345 th", "naïve 日本 🙂", "<s>the</s>", "<|end|> y"]


def test_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    """The tokenizer gives the tokens of transformers, even if another model's tokenizer is next to
    the file."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}'
    )
    for number, add_bos in enumerate((False, True)):
        metadata = {"tokenizer.ggml.add_bos_token": add_bos}
        path = gguf_files.write(
            tmp_path / f"{number}.gguf", Spec("qwen2", biases=True, metadata=metadata)
        )
        (tmp_path / "alone").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "alone")
        expected = AutoTokenizer.from_pretrained(tmp_path / "alone", gguf_file=path.name)
        output = tmp_path / f"out{number}"
        output.mkdir()
        for name, content in resolved_tokenizer(path).items():
            (output / name).write_bytes(content)
        codec = TextCodec(output)
        for text in TEXTS:
            assert codec.encode(text) == expected.encode(text), text
        assert (output / "chat_template.jinja").read_text() == expected.chat_template


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 1}
    config = Checkpoint(gguf_files.write(tmp_path / "model.gguf", Spec(metadata=metadata))).config
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1, 2))
    bare: dict[str, Any] = {
        f"tokenizer.ggml.{name}": None
        for name in ("model", "pre", "tokens", "token_type", "merges")
    }
    path = gguf_files.write(
        tmp_path / "bare.gguf", Spec(metadata=bare | {"tokenizer.ggml.eos_token_id": None})
    )
    assert Checkpoint(path).config.eos_token_ids == () and resolved_tokenizer(path) == {}


ZEROS = np.zeros((HIDDEN, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec("gpt2"), ("'gpt2' is not supported", "llama, qwen2, qwen3")),
        (Spec("granite"), ("'granite' is not supported",)),
        (Spec(metadata={"general.type": "adapter"}), ("not a model", "'adapter'")),
        (Spec(metadata={"split.count": 3}), ("one of the 3 parts", "model-00001-of-00003.gguf")),
        (Spec(metadata={"split.count": "x"}), ("split.count", "not a number of parts")),
        (Spec(metadata={"llama.expert_count": 8}), ("no 'llama.expert_used_count'",)),
        (
            Spec(metadata={"llama.expert_count": 8, "llama.expert_used_count": 2}),
            ("no tensor model.layers.0.mlp.gate.weight",),
        ),
        (Spec(metadata={"llama.expert_count": "8"}), ("expert_count is '8'",)),
        (
            Spec(experts="together", metadata={"llama.expert_shared_count": 1}),
            ("llama.expert_shared_count 1",),
        ),
        (
            Spec(experts="apart", tensors={"blk.1.ffn_up.2.weight": None}),
            ("no tensor", "1.mlp.experts.2.up_proj.weight"),
        ),
        (
            Spec(experts="apart", tensors={"blk.1.ffn_up.3.weight": ZEROS}),
            ("experts.3.up_proj.weight", "not supported"),
        ),
        (
            Spec(metadata={"llama.attention.sliding_window": 64}),
            ("llama.attention.sliding_window 64",),
        ),
        (Spec(metadata={"llama.attention.causal": False}), ("not causal",)),
        (
            Spec(metadata={"llama.rope.dimension_count": 32, "llama.attention.key_length": 64}),
            ("only 32 of a head's 64",),
        ),
        (Spec(metadata={"llama.attention.value_length": 32}), ("64 values in keys and 32",)),
        (Spec(metadata={"llama.rope.scaling.type": "longrope"}), ("'longrope'", "yarn")),
        (Spec(metadata={"llama.rope.scaling.attn_factor": 1.2}), ("rope.scaling.attn_factor",)),
        (
            Spec(tensors={"rope_freqs.weight": np.linspace(1, 9, 32).astype(np.float32)}),
            ("rope_freqs.weight", "Llama 3"),
        ),
        (Spec(tensors={"rope_freqs.weight": np.ones(8, np.float32)}), ("rope_freqs.weight", "[8]")),
        (
            Spec(metadata={"llama.attention.head_count": [4, 4, 2]}),
            ("attention.head_count", "[4, 4, 2]"),
        ),
        (Spec(metadata={"llama.block_count": None}), ("no 'llama.block_count'",)),
        (Spec(metadata={"llama.block_count": 4}), ("no tensor model.layers.3",)),
        (
            Spec(metadata={"llama.block_count": 2}),
            ("model.layers.2", "not supported for LlamaForCausalLM"),
        ),
        (
            Spec(metadata={"llama.feed_forward_length": 256}),
            ("mlp.gate_proj.weight", "its metadata requires [256, 256]"),
        ),
        (Spec(tensors={"token_embd.weight": None}), ("token_embd.weight", "incomplete")),
        (
            Spec(tensors={"blk.0.attn_sinks.weight": ZEROS}),
            ("blk.0.attn_sinks.weight", "not supported"),
        ),
        (
            Spec("qwen3", head_dim=64, tensors={"blk.0.attn_q.bias": ZEROS[0]}),
            ("no tensor", "self_attn.k_proj.bias"),
        ),
        (
            Spec(tensors={"blk.0.attn_q.weight": ZEROS.astype(np.int32)}),
            ("blk.0.attn_q.weight", "I32", "Q4_0"),
        ),
        (
            Spec(tensors={"output_norm.weight": np.full(HIDDEN, np.nan, np.float32)}),
            ("output_norm.weight", "not finite"),
        ),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, spec: Spec, words: tuple[str, ...]
) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", spec)
    assert_refused(
        run(export_main, "--model", path, "--exit-layer", 1, "-o", tmp_path / "plans"),
        "model.gguf",
        *words,
    )
    assert not (tmp_path / "plans").exists()


def retype(data: bytes, name: str, number: int) -> bytes:
    """Change the type of a tensor that has two dimensions."""
    at = data.index(name.encode()) + len(name) + 4 + 16
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", ("neither a directory nor a GGUF file",)),
        (lambda data: b"PK\x03\x04" + data[4:], ("neither a directory nor a GGUF file",)),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], ("big-endian",)),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], ("version 1", "2 and 3")),
        (lambda data: data[:10], ("truncated",)),
        (lambda data: data[:1000], ("truncated",)),
        (lambda data: data[:-1000], ("truncated", "ends past the end")),
        (lambda data: data[:8] + b"\xff" * 16 + data[24:], ("truncated or damaged",)),
        (
            lambda data: retype(data, "blk.0.ffn_up.weight", 20),
            ("blk.0.ffn_up.weight", "IQ4_NL", "Q6_K"),
        ),
        (lambda data: retype(data, "blk.0.ffn_up.weight", 99), ("blk.0.ffn_up.weight", "type 99")),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Any, words: tuple[str, ...]) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices="Q4_0"))
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(
        run(export_main, "--model", path, "--exit-layer", 1, "-o", tmp_path / "plans"),
        "model.gguf",
        *words,
    )


def test_a_list_longer_than_the_file_is_refused_at_once(tmp_path: Path) -> None:
    """The library's reader would make an array for each element, until the memory is full."""
    key = b"general.list"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    path = tmp_path / "model.gguf"
    path.write_bytes(header + struct.pack("<IIQ", 9, 0, 1 << 40) + bytes(64))
    with pytest.raises(EESDError, match="goes beyond the end"):
        Checkpoint(path)


def test_any_damage_is_one_sentence(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", Spec(matrices="Q4_0"))
    data = path.read_bytes()
    end = data.index(b"output_norm.weight") + 4000

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.tuples(st.integers(4, end), st.integers(0, 255)), min_size=1, max_size=8))
    def damaged(changes: list[tuple[int, int]]) -> None:
        changed = bytearray(data)
        for at, value in changes:
            changed[at] = value
        path.write_bytes(changed)
        try:
            Checkpoint(path).fingerprint()
        except EESDError as error:
            assert str(error).endswith(".") and "\n" not in str(error), error

    damaged()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    result = run(
        export_main, "--model", tmp_path / "none.gguf", "--exit-layer", 1, "-o", tmp_path / "plans"
    )
    assert_refused(result, "no file", "none.gguf")


@pytest.mark.parametrize("heads", [[0, 2], [1, 2, 0], [0, 0, 0], ["2", 0, 0], [-2, 0, 0]])
def test_heads_of_layers_that_differ_are_refused(tmp_path: Path, heads: list[Any]) -> None:
    metadata = {"lfm2.attention.head_count_kv": heads}
    if "2" in heads:
        metadata["lfm2.attention.head_count_kv"] = [str(count) for count in heads]
    path = gguf_files.write(tmp_path / "model.gguf", Spec("lfm2", tied=True, metadata=metadata))
    with pytest.raises(EESDError, match="head_count_kv"):
        Checkpoint(path)


TABLE = json.loads((Path(__file__).parent.parent / "data" / "gguf_ends.json").read_text("utf-8"))
KINDS = {"normal": 1, "control": 3, "user": 4}
MORE = {"\u2581<EOT>", "<|end_of_turn|>"}
"""The end tokens of this table that llama.cpp does not recognize by their names."""
TEMPLATE = "tokenizer.chat_template"


def vocabulary(family: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the metadata of a small file that has a family's special tokens."""
    types = {token: kind for name, kind in KINDS.items() for token in family.get(name, ())}
    types = {"<unk>": 2, "a": 1, "aa": 1} | types
    tokens = list(types)
    given = {"eos_token_id": family["eos"]} | family.get("given", {})
    return {
        "model": family["model"],
        "tokens": tokens,
        "token_type": list(types.values()),
        "bos_token_id": 1,
        **{key: tokens.index(token) for key, token in given.items()},
        **more,
    }


def ends_of(path: Path, metadata: dict[str, Any]) -> set[str]:
    file = read_gguf(write_metadata(path / "model.gguf", metadata))
    return {metadata["tokens"][token] for token in end_tokens(Fields(file.metadata))}


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family["name"])
def test_texts_end_where_llama_cpp_ends_them(tmp_path: Path, family: dict[str, Any]) -> None:
    control = family["control"]
    given = {family["eos"], *family.get("given", {}).values()}
    right = {token for token in family["llama_cpp"] if token in control or token in given}
    assert ends_of(tmp_path, vocabulary(family)) == right | MORE.intersection(control)


def test_the_end_of_a_turn_that_the_template_writes_counts_whatever_its_type(
    tmp_path: Path,
) -> None:
    """In files of Gemma 2 that an older converter wrote, the token that ends a turn is not a
    control token."""
    [family] = [one for one in TABLE if one["name"] == "Gemma 2, first files"]
    template = "{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn>\n{% endfor %}"
    assert "<end_of_turn>" not in ends_of(tmp_path, vocabulary(family))
    metadata = vocabulary(family, scores=[0.0] * 20, **{TEMPLATE: template})
    assert ends_of(tmp_path, metadata) == {"<eos>", "<end_of_turn>"}
    tokenizer, _ = gguf_tokenizer(read_gguf(tmp_path / "model.gguf"))
    ids = tokenizer.encode("</s><end_of_turn>", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "</s>"


@pytest.mark.parametrize("kind", [1, 4])
@pytest.mark.parametrize("name", ["</s>", "<|im_end|>", "<fim_prefix>", "[EOS]"])
def test_a_token_that_the_file_calls_text_is_text(tmp_path: Path, kind: int, name: str) -> None:
    tokens = ["<|x|>", *VOCABULARY[len(SPECIAL) :], name]
    types = [3, *[1] * (len(tokens) - 2), kind]
    metadata = {
        "tokens": tokens,
        "token_type": types,
        "model": "gpt2",
        "pre": "qwen2",
        "merges": gguf_files.MERGES,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    path = write_metadata(tmp_path / "model.gguf", metadata)
    assert end_tokens(Fields(read_gguf(path).metadata)) == [0]
    tokenizer, _ = gguf_tokenizer(read_gguf(path))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    ids = codec.encode(f"the {name} <|x|>!")
    last = tokens.index(name)
    assert last in ids and codec.decode(ids) == f"the {name} !"
    stream = TextStream(codec, [], ())
    assert "".join(map(stream.push, ids)) == f"the {name} !"


def test_an_export_shows_all_ends_and_its_texts_stop_there(tmp_path: Path) -> None:
    """Here the text stops at the likeliest first token, called ``<|fim_pad|>``, which no metadata
    names."""
    path = gguf_files.write(tmp_path / "first.gguf", Spec())
    plain = eesd.load(export_engine(path, tmp_path / "first")).generate([40, 77], max_new_tokens=6)
    end = next(token for token in plain.tokens if token >= len(SPECIAL))
    tokens = list(VOCABULARY)
    types = [3] * len(SPECIAL) + [1] * len(VOCABULARY)
    tokens[end] = "<|fim_pad|>"
    types[end] = 3
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["t h"],
    }
    engine = export_engine(
        gguf_files.write(tmp_path / "model.gguf", Spec(metadata=metadata)), tmp_path / "plans"
    )
    assert load_manifest(engine).eos_token_ids == (1, 2, end)
    assert f"1, 2, {end}" in succeed(inspect_main, engine).stdout
    found = eesd.load(engine).generate([40, 77], max_new_tokens=6)
    assert found.tokens == plain.tokens[: plain.tokens.index(end) + 1]
    assert found.finish_reason == "stop"


def test_marks_of_code_end_a_text_between_two_others(tmp_path: Path) -> None:
    [family] = [one for one in TABLE if one["name"] == "Qwen2.5-Coder"]
    metadata = vocabulary(family, pre="qwen2", merges=["a a"])
    tokenizer, _ = gguf_tokenizer(read_gguf(write_metadata(tmp_path / "model.gguf", metadata)))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    marks = [f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix", "pad")]
    right = {"<|endoftext|>", *marks, "<|repo_name|>", "<|file_sep|>"}
    found = ends_between(TextCodec(tmp_path))
    assert {metadata["tokens"][token] for token in found} == right


SPEC = Spec(matrices="Q4_0", table="Q8_0")


def part(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05d}-of-00004.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    directory = tmp_path / "split"
    directory.mkdir()
    first = gguf_files.write(directory / "model.gguf", SPEC, most=8)
    assert sorted(directory.iterdir()) == [part(directory, number) for number in (1, 2, 3, 4)]
    assert first == part(directory, 1)
    return directory


def test_parts_are_the_model_of_the_joined_file(split: Path, tmp_path: Path) -> None:
    joined = gguf_files.write(tmp_path / "model.gguf", SPEC)
    first = part(split, 1)
    assert Checkpoint(first).fingerprint() == Checkpoint(joined).fingerprint()
    assert resolved_tokenizer(first) == resolved_tokenizer(joined)
    texts = [
        eesd.load(export_engine(model, tmp_path / name)).generate([40, 77], max_new_tokens=8)
        for model, name in ((first, "first"), (joined, "joined"))
    ]
    assert texts[0].tokens == texts[1].tokens


def test_the_cache_knows_all_parts(split: Path) -> None:
    before = place_of(split, "model", part(split, 1), {}, None)
    with part(split, 3).open("ab") as file:
        file.write(b"x")
    assert place_of(split, "model", part(split, 1), {}, None) != before


@pytest.mark.parametrize(
    ("damage", "given", "words"),
    [
        (lambda here: part(here, 3).unlink(), 1, ("00003-of-00004.gguf is missing beside it",)),
        (
            lambda here: None,
            2,
            ("one of the 4 parts", "give the first one", "model-00001-of-00004"),
        ),
        (lambda here: shutil.copy(part(here, 2), part(here, 3)), 1, ("not part 3 of 4",)),
        (
            lambda here: shutil.copy(
                gguf_files.write(
                    here / "other.gguf", Spec(matrices="Q4_0", table="Q8_0", tied=True), most=8
                ).with_name("other-00004-of-00004.gguf"),
                part(here, 4),
            ),
            1,
            ("different models", "tensors"),
        ),
    ],
)
def test_missing_and_foreign_parts_are_refused(
    split: Path, damage: Callable[[Path], object], given: int, words: tuple[str, ...]
) -> None:
    damage(split)
    with pytest.raises(EESDError) as caught:
        Checkpoint(part(split, given))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_first_part_with_another_name_is_refused(split: Path) -> None:
    other = part(split, 1).rename(split / "weights.gguf")
    with pytest.raises(EESDError, match=r"with its own name: weights-00001-of-00004\.gguf"):
        Checkpoint(other)
