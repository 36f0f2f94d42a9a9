"""The two programs that become engines: **draft** (prefix + exit head) and **verify** (the whole model).

Both take the same inputs and write the same caches. There are L + E caches: 0..L-1 belong to the base layers, L.. to the exit
blocks. The draft uses 0..N-1 and the exit ones; the verify pass uses all, and leaves all of them right for every token it saw.

A verify pass may be split by layers into stages, each for a device of its own. The first has all that the draft uses.
"""

import torch
from torch import Tensor, nn

from eesd.model.decoder import KV, Decoder, Inputs
from eesd.model.exit_head import ExitHead


def draft_layers(head: ExitHead, num_layers: int) -> list[int]:
    """Indices of the caches that the draft uses: 0..N-1, then L..L+E-1."""
    config = head.exit_config
    return [*range(config.layer), *range(num_layers, num_layers + config.blocks)]


class Draft(nn.Module):
    """The first N layers and the exit head.

    ``forward`` gives logits [B, n, V] in float32, the ``top_k`` most likely token ids and their log-probabilities
    [B, n, K], and the written caches.
    """

    def __init__(self, decoder: Decoder, head: ExitHead, top_k: int) -> None:
        super().__init__()
        self.model = decoder.model
        self.lm_head = decoder.lm_head
        self.exit_head = head
        self.top_k = top_k

    def forward(self, input_ids: Tensor, inputs: Inputs, caches: list[KV]) -> tuple[Tensor, Tensor, Tensor, list[KV]]:
        layer = self.exit_head.exit_config.layer
        x = self.model.embed_tokens(input_ids)
        written = []
        for block, cache in zip(self.model.layers[:layer], caches[:layer], strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        logits, exit_caches = self.exit_head(x, inputs, caches[layer:], self.lm_head)
        logits = logits.float()
        values, ids = torch.topk(logits, self.top_k)
        logprobs = values - torch.logsumexp(logits, -1, keepdim=True)
        return logits, ids, logprobs, written + exit_caches


class Verify(nn.Module):
    """The whole model, or one stage of it: the layers ``layers``.

    The first stage takes ``input_ids`` [B, n] as ``x``, the others the hidden state [B, n, hidden] that the stage before them
    gave; the last gives logits [B, n, V] in float32. All give their written caches, the first stage the exit blocks' too.
    """

    def __init__(self, decoder: Decoder, head: ExitHead, layers: range | None = None) -> None:
        super().__init__()
        self.model = decoder.model
        self.lm_head = decoder.lm_head
        self.exit_head = head
        self.layers = range(decoder.geometry.num_layers) if layers is None else layers

    def forward(self, x: Tensor, inputs: Inputs, caches: list[KV]) -> tuple[Tensor, list[KV]]:
        exit_layer, count = self.exit_head.exit_config.layer, len(self.layers)
        if self.layers.start == 0:
            x = self.model.embed_tokens(x)
        written = []
        exit_caches: list[KV] = []
        for index, cache in zip(self.layers, caches[:count], strict=True):
            x, cache = self.model.layers[index](x, inputs, cache)
            written.append(cache)
            if index == exit_layer - 1:
                exit_caches = self.exit_head.write(x, inputs, caches[count:])
        if self.layers.stop == len(self.model.layers):
            x = self.lm_head(self.model.norm(x)).float()
        return x, written + exit_caches
