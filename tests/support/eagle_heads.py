"""Random heads for the tests. They are exit heads with deep layers, and EAGLE-3 heads in the
published layouts. The EAGLE-3 heads have a reference that follows the text of the paper.

The reference shares no code with the project. At every step it recomputes the whole text without
caches.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eesd.common.geometry import ExitConfig
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import ExitHead
from eesd.model.loading import load_exit_head, make_initial_head, save_exit_head
from support.tiny_checkpoints import randomise

LAYOUTS = ("safeailab", "specforge", "speculators", "eagle-3.1")
"""Speculators writes the last two layouts. The first of these has one norm for all states, and the
second has a norm for each state."""


def write_head(
    directory: Path,
    model: dict[str, Any],
    layout: str,
    draft_vocab: int = 0,
    seed: int = 0,
    embeddings: Tensor | None = None,
    **changes: Any,
) -> Path:
    """Write a random head for a model with this ``config.json``. ``changes`` are fields with the
    block's sizes."""
    hidden = model["hidden_size"]
    vocab = model["vocab_size"]
    speculators = layout in LAYOUTS[2:]
    sizes: dict[str, Any] = {
        name: model[name] for name in ("hidden_size", "vocab_size", "num_attention_heads")
    }
    sizes |= {
        "num_key_value_heads": model["num_key_value_heads"],
        "head_dim": model["head_dim"],
        "rms_norm_eps": 1e-5,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
    }
    sizes |= {"model_type": "llama", "rope_theta": 5000.0, "attention_bias": False} | changes
    columns = draft_vocab or vocab
    heads = sizes["num_attention_heads"] * sizes["head_dim"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    size = 80
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, inputs: int) -> Tensor:
        found: Tensor = torch.randn(rows, inputs, generator=random) / inputs**0.5
        return found

    def norm(parts: int = 1) -> Tensor:
        return 1 + 0.2 * torch.randn(parts * hidden, generator=random)

    block = "layers.0." if speculators else "midlayer."
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "norm.weight": norm(),
        "lm_head.weight": 3 * matrix(columns, hidden),
        f"{block}self_attn.q_proj.weight": matrix(heads, 2 * hidden),
        f"{block}self_attn.k_proj.weight": matrix(kv, 2 * hidden),
        f"{block}self_attn.v_proj.weight": matrix(kv, 2 * hidden),
        f"{block}self_attn.o_proj.weight": matrix(hidden, heads),
        f"{block}mlp.gate_proj.weight": matrix(size, hidden),
        f"{block}mlp.up_proj.weight": matrix(size, hidden),
        f"{block}mlp.down_proj.weight": matrix(hidden, size),
        **{
            f"{block}{name}.weight": norm()
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }
    norms = {
        "speculators": ["input_norm"],
        "eagle-3.1": ["fc_norm.0", "fc_norm.1", "fc_norm.2"],
    }.get(layout, [])
    tensors |= {f"{name}.weight": norm(3 // len(norms)) for name in norms}
    chosen = np.sort(np.random.default_rng(seed).choice(vocab, columns, replace=False))
    if draft_vocab:
        tensors["d2t"] = torch.from_numpy(chosen - np.arange(columns))
        tensors["t2d"] = torch.from_numpy(np.isin(np.arange(vocab), chosen))
    if embeddings is not None:
        tensors["embed_tokens.weight"] = embeddings
    config: dict[str, Any] = {"draft_vocab_size": columns}
    if speculators:
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": sizes,
            "norm_before_residual": layout == "speculators",
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
            "norm_before_fc": layout == "speculators",
            "fc_norm": layout == "eagle-3.1",
            "norm_output": True,
        }
    elif layout == "specforge":
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            **sizes,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
                "use_aux_hidden_state": True,
            },
        }
    else:
        config |= {"architectures": ["LlamaForCausalLM"], **sizes}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


class Reference:
    """Computes the predictions of a head in float32, as the paper and its appendix describe
    them."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        config: dict[str, Any],
        embeddings: Tensor,
        layers: tuple[int, ...],
    ) -> None:
        """``layers`` are the layers of the model whose states the head reads. They are counted from
        1."""
        self.weights = {
            name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()
        }
        self.sizes = config.get("transformer_layer_config", config)
        self.embeddings = embeddings
        self.layers = layers
        self.normed_residual = bool(config.get("norm_before_residual"))
        self.fuse_norms = sorted(
            name[:-7] for name in tensors if name.startswith(("input_norm", "fc_norm"))
        )
        self.normed_output = bool(config.get("norm_output"))

    def drafted(self, states: list[Tensor], tokens: list[int], known: int) -> Tensor:
        """Returns the logits [Vd] after the last token. The model's states are known for the first
        ``known`` tokens.

        Token i + 1 is paired with the feature of token i. This feature is the fused states of the
        model, or the head's output if the states are unknown. The head's sequence therefore begins
        with the second token.

        Args:
            states: Hidden states after each layer, each of shape [tokens, hidden]. Index 0 has the
                embeddings.
            tokens: The tokens of the text, followed by the drafted tokens.
            known: At least 1.
        """
        features = torch.cat([states[layer][:known] for layer in self.layers], -1)
        if self.fuse_norms:
            parts = zip(features.chunk(len(self.fuse_norms), -1), self.fuse_norms, strict=True)
            features = torch.cat([self._norm(part, name) for part, name in parts], -1)
        features = features @ self.weights["fc.weight"].T
        while True:
            output = self._block(torch.tensor(tokens[1 : len(features) + 1]), features)
            if len(features) == len(tokens) - 1:
                logits: Tensor = self._norm(output[-1], "norm") @ self.weights["lm_head.weight"].T
                return logits
            features = torch.cat(
                [features, self._norm(output[-1:], "norm") if self.normed_output else output[-1:]]
            )

    def _block(self, tokens: Tensor, features: Tensor) -> Tensor:
        sizes = self.sizes
        count = len(tokens)
        heads = sizes["num_attention_heads"]
        kv = sizes["num_key_value_heads"]
        width = sizes["head_dim"]
        embedded = self._norm(self.embeddings[tokens], "midlayer.input_layernorm")
        normed = self._norm(features, "midlayer.hidden_norm")
        read = torch.cat([embedded, normed], -1)
        q, k, v = (
            read @ self.weights[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv"
        )
        angles = torch.arange(count)[:, None] / sizes["rope_theta"] ** (
            torch.arange(0, width, 2) / width
        )

        def turned(x: Tensor, number: int) -> Tensor:
            first, second = x.view(count, number, width).chunk(2, -1)
            cos = angles.cos()[:, None]
            sin = angles.sin()[:, None]
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        q = turned(q, heads)
        k = turned(k, kv)
        v = v.view(count, kv, width)
        attended = []
        for head in range(heads):
            own = head * kv // heads
            scores = q[:, head] @ k[:, own].T / width**0.5
            scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
            attended.append(scores.softmax(-1) @ v[:, own])
        x = (normed if self.normed_residual else features) + torch.cat(attended, -1) @ self._matrix(
            "self_attn.o_proj"
        )
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate = y @ self._matrix("mlp.gate_proj")
        found: Tensor = x + (
            torch.sigmoid(gate) * gate * (y @ self._matrix("mlp.up_proj"))
        ) @ self._matrix("mlp.down_proj")
        return found

    def _matrix(self, name: str) -> Tensor:
        return self.weights[f"midlayer.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        found: Tensor = (
            x
            / (x.pow(2).mean(-1, keepdim=True) + self.sizes["rms_norm_eps"]).sqrt()
            * self.weights[f"{name}.weight"]
        )
        return found


def train(
    directory: Path, model: Any, layers: tuple[int, ...], steps: int, length: int = 20
) -> None:
    """Train a head in place on greedy texts of the model. The loss is the cross-entropy with the
    model's most likely tokens. The input of the head is first the model's states, and then the
    head's previous outputs (training-time test).

    Args:
        directory: Directory of the head.
        model: The transformers model.
        layers: The layers that the head reads, counted from 1.
        steps: Number of steps of Adam, with 4 texts each.
        length: Number of tokens in a text. The first three are random.
    """
    file = directory / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((directory / "config.json").read_text())
    trained = {
        name: value.requires_grad_() for name, value in tensors.items() if value.is_floating_point()
    }
    made = Reference(tensors, config, model.model.embed_tokens.weight.detach(), layers)
    adam = torch.optim.Adam(list(trained.values()), 4e-3)
    random = torch.Generator().manual_seed(0)
    columns = torch.arange(len(tensors["lm_head.weight"])) + tensors.get("d2t", 0)
    column_of = torch.full(
        (config.get("vocab_size") or config["transformer_layer_config"]["vocab_size"],), -100
    )
    column_of[columns] = torch.arange(len(columns))
    texts = torch.randint(3, len(column_of), (4 * steps, 3), generator=random)
    with torch.no_grad():
        texts = model.generate(
            texts, max_length=length, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    for step in range(steps):
        with torch.no_grad():
            found = model(texts[4 * step : 4 * step + 4], output_hidden_states=True)
        fused = (
            torch.cat([found.hidden_states[layer] for layer in layers], -1) @ tensors["fc.weight"].T
        )
        wanted = column_of[found.logits.argmax(-1)]
        loss = torch.zeros(())
        for text, features, targets in zip(texts[4 * step :], fused, wanted, strict=False):
            first = made._block(text[1:], features[:-1])
            second = made._block(text[1:], torch.cat([features[:1], first[:-1]]))
            for output in (first, second):
                logits = made._norm(output, "norm") @ tensors["lm_head.weight"].T
                loss = (
                    loss
                    + torch.nn.functional.cross_entropy(logits, targets[1:], ignore_index=-100) / 8
                )
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        for group in adam.param_groups:
            group["lr"] = 4e-3 * (1 - step / steps)
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, file)


def deep_head(checkpoint: Checkpoint, directory: Path, blocks: int = 1) -> ExitHead:
    """A random head after layer 1 that reads the states after all later layers. It is also
    written to ``directory``."""
    deep = tuple(range(2, checkpoint.geometry.num_layers + 1))
    config = ExitConfig(1, blocks, base=checkpoint.fingerprint(), trained=True, deep=deep)
    head = make_initial_head(checkpoint, config).requires_grad_(False)
    randomise(head, seed=4)
    save_exit_head(head, directory, torch.float32)
    return load_exit_head(checkpoint, directory)
