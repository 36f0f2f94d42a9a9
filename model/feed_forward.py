"""The second half of a block, for each token alone: an MLP, or a mixture of MLPs."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from eesd.common.geometry import Geometry

EVEN_ROWS = 4
"""On the CPU, torch's float32 products add in another order where the number of rows is no multiple
of this. So a row is there several times where bits shall not depend on other tokens."""


def joint_linear(x: Tensor, layers: tuple[nn.Linear, ...]) -> Tensor:
    """The outputs of linear layers for x [..., in], side by side: [..., sum of out]."""
    return torch.cat([layer(x) for layer in layers], -1)


def activate(gate: Tensor, activation: str) -> Tensor:
    """What an MLP's other half is multiplied by."""
    return (
        nn.functional.silu(gate)
        if activation == "silu"
        else nn.functional.gelu(gate, approximate="tanh")
    )


class MLP(nn.Module):
    """SwiGLU feed-forward network, or one with another activation."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.activation = geometry.activation
        self.gate_proj = nn.Linear(
            geometry.hidden_size, geometry.intermediate_size, bias=geometry.mlp_bias
        )
        self.up_proj = nn.Linear(
            geometry.hidden_size, geometry.intermediate_size, bias=geometry.mlp_bias
        )
        self.down_proj = nn.Linear(
            geometry.intermediate_size, geometry.hidden_size, bias=geometry.mlp_bias
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joint_linear(x, (self.gate_proj, self.up_proj)).chunk(2, -1)
        down: Tensor = self.down_proj(activate(gate, self.activation) * up)
        return down


class Mixture(nn.Module):
    """A mixture of experts: the sum of a few MLPs, which a router chooses for each token, and of
    its weights.

    A GPU runs each expert on all tokens. Its inputs are 0 where a token does not use it, and so
    are its outputs, whatever the type's range is. A CPU runs an expert on the tokens that use it.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        experts = geometry.experts
        assert experts is not None
        self.used, self.normed = experts.used, experts.normed
        self.gate = nn.Linear(geometry.hidden_size, experts.count, bias=False)
        one = replace(geometry.dense, intermediate_size=experts.size)
        self.experts = nn.ModuleList(MLP(one) for _ in range(experts.count))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x)
        # Where the host must not wait for what is chosen.
        if x.is_cuda:
            return self._all(x, weights)
        return self._chosen(x.flatten(0, -2), weights.flatten(0, -2)).view(x.shape)

    def route(self, x: Tensor) -> Tensor:
        """The weights of the experts for x [B, n, hidden], in its type: [B, n, E], 0 where a token
        does not use one."""
        shares = self.gate(x).float().softmax(-1)
        chosen, indices = shares.topk(self.used, -1)
        if self.normed:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return torch.zeros_like(shares).scatter(-1, indices, chosen).to(x.dtype)

    def _all(self, x: Tensor, weights: Tensor) -> Tensor:
        uses = (weights > 0).to(x.dtype)
        y = torch.zeros_like(x)
        for expert, weight, used in zip(
            self.experts, torch.split(weights, 1, -1), torch.split(uses, 1, -1), strict=True
        ):
            y = y + expert(x * used) * weight
        return y

    def _chosen(self, x: Tensor, weights: Tensor) -> Tensor:
        """The same for x [tokens, hidden] and weights [tokens, E]."""
        y = torch.zeros_like(x)
        for index in (weights > 0).any(0).nonzero()[:, 0].tolist():
            tokens = (weights[:, index] > 0).nonzero()[:, 0]
            rows = torch.cat((tokens, tokens[:1].expand(-len(tokens) % EVEN_ROWS)))
            found = self.experts[index](x[rows])[: len(tokens)]
            y = y.index_add(0, tokens, found * weights[tokens, index, None])
        return y


def make_feed_forward(geometry: Geometry) -> MLP | Mixture:
    """The second half of a block of this geometry."""
    return MLP(geometry) if geometry.experts is None else Mixture(geometry)
