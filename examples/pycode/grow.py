"""Make a wider Qwen2 of a trained Llama, with the same function: a start for training that has
learned already.

    python grow.py --model model/ --hidden 384 --intermediate 704 --output work/grown

Hidden states are rotated into the wider space by a random orthonormal matrix. What reads hidden
states gets random weights for the directions that are new, of the same size as the others: hidden
states have no part there before training. Heads and neurons that are new begin with random inputs
and without an output.
"""

import math
from pathlib import Path

import click
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)


class Rotation:
    """From ``small`` to ``large`` hidden dimensions. Root mean squares shrink, so norms enlarge by
    ``gain``."""

    def __init__(self, small: int, large: int) -> None:
        basis, _ = torch.linalg.qr(torch.randn(large, large))
        self.kept = basis[:, :small]
        self.new = basis[:, small:]
        self.gain = math.sqrt(large / small)

    def reader(self, weight: Tensor, norm: Tensor, rows: int) -> Tensor:
        """[rows, large] for a matrix [n, small] that reads hidden states after a norm with these
        weights [small]."""
        known = weight * norm / self.gain @ self.kept.T
        size = known.square().mean().sqrt() * self.gain
        fresh = size * torch.randn(len(known), self.new.shape[1]) @ self.new.T
        return torch.cat([known + fresh, size * torch.randn(rows - len(known), known.shape[1])])

    def writer(self, weight: Tensor, columns: int) -> Tensor:
        """[large, columns] for a matrix [small, n] that adds to hidden states."""
        return torch.nn.functional.pad(self.kept @ weight, (0, columns - weight.shape[1]))


def grown(small: LlamaForCausalLM, hidden: int, intermediate: int) -> Qwen2ForCausalLM:
    """Return a model with the same logits, but for rounding. Its heads are as large as before, and
    so are their groups."""
    old = small.config
    groups = old.num_attention_heads // old.num_key_value_heads
    heads = hidden // old.head_dim
    config = Qwen2Config(
        vocab_size=old.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // groups,
        max_position_embeddings=old.max_position_embeddings,
        rope_parameters=old.rope_parameters,
        rms_norm_eps=old.rms_norm_eps * old.hidden_size / hidden,
        tie_word_embeddings=False,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    rotation = Rotation(old.hidden_size, hidden)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, value in state.items():
        parts = name.split(".")
        source = small.state_dict().get(name)
        layer = small.model.layers[int(parts[2])] if "layers" in parts else None
        if "norm" in parts[-2]:
            value.fill_(1.0)
        elif parts[-2] == "embed_tokens":
            value.copy_(source @ rotation.kept.T)
        elif parts[-2] == "lm_head":
            value.copy_(rotation.reader(source, small.model.norm.weight, len(value)))
        elif parts[-1] == "weight" and parts[-2] in ("o_proj", "down_proj"):
            value.copy_(rotation.writer(source, value.shape[1]))
        elif parts[-1] == "weight":
            norm = (
                layer.input_layernorm
                if parts[-3] == "self_attn"
                else layer.post_attention_layernorm
            )
            value.copy_(rotation.reader(source, norm.weight, len(value)))
    model.load_state_dict(state)
    return model


@click.command()
@click.option(
    "--model", "source", type=click.Path(path_type=Path), default=Path("model"), show_default=True
)
@click.option("--hidden", default=384, show_default=True)
@click.option("--intermediate", default=704, show_default=True)
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("work/grown"), show_default=True
)
@click.option("--seed", default=0, show_default=True)
@torch.no_grad()
def main(source: Path, hidden: int, intermediate: int, output: Path, seed: int) -> None:
    """Write the wider model, after a comparison of its logits with the smaller one's."""
    torch.manual_seed(seed)
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = grown(small, hidden, intermediate)
    ids = torch.randint(small.config.vocab_size, (2, 64))
    difference = (model(ids).logits - small(ids).logits).abs().max().item()
    click.echo(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M weights; logits differ by "
        f"at most {difference:.2g}"
    )
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


if __name__ == "__main__":
    main()
