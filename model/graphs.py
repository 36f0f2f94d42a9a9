"""The torch modules that are exported as graphs: **draft** (the first N layers and the exit head)
and **verify** (the model).

Both take the same inputs and share one set of L + E caches: 0 .. L-1 belong to the base layers, L
.. L+E-1 to the exit blocks; with deep layers there is one more, L+E. The draft uses 0 .. N-1 and
those from L on. Verify writes all caches. After a verify pass the draft can therefore go on at
once: it has no caches to fill.

Verify folds grouped heads, so that its logits do not depend on how many tokens a pass has. The
draft needs no such promise: nothing that it computes reaches the output. For one token, engines
have a faster attention with the heads apart. TensorRT-RTX does not have it for long caches, and
copies a cache that it reads otherwise: once if heads are folded, else for every head.

Verify computes logits only for the tokens that its caller names: nobody reads those of a prompt,
and the LM head is a large part of a small model.

A head of EAGLE-3 (``eagle.py``) stands behind the embeddings: its draft runs no base layer.

Verify can be split by layers into stages that run on different devices. The first stage has every
cache that the draft uses. A head that reads states of layers needs a single stage: their caches are
the draft's, and written behind the last of the layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from eesd.model.decoder import KV, Decoder, Inputs, capped, fold_mask
from eesd.model.exit_head import ExitHead


class Graph(nn.Module):
    """The parts of a draft or verify, and the kernels that an engine has for it.

    Attributes:
        best: Makes of logits [B, n, V] in any type, K and a draft vocabulary what engines return to
            their callers (:func:`~eesd.runtime.engines.torch_fused.find_best`). None: operators of
            torch do, from float32.
        unmasked: Tokens of a sequence, at most, for which attention derives the mask.
    """

    def __init__(self, decoder: Decoder, head: ExitHead) -> None:
        super().__init__()
        self.model, self.lm_head, self.exit_head, self.geometry = (
            decoder.model,
            decoder.lm_head,
            head,
            decoder.geometry,
        )
        self.kv_heads = decoder.geometry.num_kv_heads
        self.group = decoder.geometry.num_heads // self.kv_heads
        self.best: Callable[[Tensor, int, Tensor | None], Tensor] | None = None
        self.unmasked = 0

    def _capped(self, logits: Tensor, cap: float) -> Tensor:
        """Logits with the model's cap, in float32 unless :attr:`best` takes them as they are."""
        return capped(logits.float() if cap or self.best is None else logits, cap)


class Draft(Graph):
    """The first N layers and the exit head. A head without blocks uses the model's own LM head,
    whose logits have a cap.

    Args:
        decoder: The base model.
        head: The exit head.
        top_k: K, the number of candidates to return for each token.
        folded: Whether to fold grouped heads, as verify does.
    """

    def __init__(self, decoder: Decoder, head: ExitHead, top_k: int, folded: bool = False) -> None:
        super().__init__(decoder, head)
        self.top_k, self.folded = top_k, folded

    def forward(
        self, input_ids: Tensor, inputs: Inputs, caches: list[KV]
    ) -> tuple[*tuple[Tensor, ...], list[KV]]:
        """Run a draft step.

        Args:
            input_ids: Token ids [B, n].
            inputs: Shared inputs of the layers.
            caches: The caches 0 .. N-1, and those of the exit head.

        Returns:
            Logits [B, n, V] in float32, or [B, n, Vd] with a draft vocabulary; ids [B, n, K] in the
            whole vocabulary and log-probabilities [B, n, K] of the K most likely tokens, most
            likely first; the written caches. With :attr:`best` the logits have the model's type,
            and one tensor has ids and log-probabilities.
        """
        layer = self.exit_head.exit_config.layer
        if self.folded:
            inputs = fold_mask(inputs, self.group, self.kv_heads)
        x = self.model.embed_tokens(input_ids)
        written = []
        for block, cache in zip(self.model.layers[:layer], caches[:layer], strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        logits, exit_caches = self.exit_head(x, inputs, caches[layer:], self.lm_head)
        logits = self._capped(
            logits, 0 if self.exit_head.exit_config.blocks else self.geometry.logit_cap
        )
        if self.best is not None:
            return (
                logits,
                self.best(logits, self.top_k, self.exit_head.draft_vocab),
                written + exit_caches,
            )
        values, columns = torch.topk(logits, self.top_k)
        logprobs = values - torch.logsumexp(logits, -1, keepdim=True)
        return logits, self.exit_head.tokens(columns), logprobs, written + exit_caches


class Verify(Graph):
    """The whole model, or one stage of it.

    Args:
        decoder: The base model.
        head: The exit head, whose caches the pass also writes.
        layers: The layers of the stage; None for all.
    """

    def __init__(self, decoder: Decoder, head: ExitHead, layers: range | None = None) -> None:
        super().__init__(decoder, head)
        self.layers = range(decoder.geometry.num_layers) if layers is None else layers

    def forward(
        self, x: Tensor, inputs: Inputs, caches: list[KV]
    ) -> tuple[*tuple[Tensor, ...], list[KV]]:
        """Run a verify pass.

        Args:
            x: Token ids [B, n] for the first stage, the previous stage's hidden state
                [B, n, hidden] for the others.
            inputs: Shared inputs of the layers.
            caches: The caches of the stage's layers; for the first stage also those of the exit
                head.

        Returns:
            Logits [B, R, V] in float32 from the last stage, for the tokens ``inputs.logit_rows``;
            hidden state [B, n, hidden] from the others; the written caches. With :attr:`best` the
            logits have the model's type, and what it makes of them follows.
        """
        head, count = self.exit_head.exit_config, len(self.layers)
        if x.shape[1] > self.unmasked:
            inputs = fold_mask(inputs, self.group, self.kv_heads)
        if self.layers.start == 0:
            x = self.model.embed_tokens(x)
        embedded, written = x, []
        exit_caches: list[KV] = []
        states: list[Tensor] = []
        for index, cache in zip(self.layers, caches[:count], strict=True):
            x, cache = self.model.layers[index](x, inputs, cache)
            written.append(cache)
            if index == head.layer - 1:
                exit_caches = self.exit_head.write_kv(
                    x, inputs, caches[count : count + head.blocks]
                )
            if index + 1 in head.read_layers:
                states.append(x)
        if states:
            exit_caches += self.exit_head.write_states(
                embedded, states, inputs, caches[count + len(exit_caches) :]
            )
        if self.layers.stop == len(self.model.layers):
            if inputs.logit_rows is not None:
                x = x.index_select(1, inputs.logit_rows)
            x = self._capped(self.lm_head(self.model.norm(x)), self.geometry.logit_cap)
            if self.best is not None:
                return x, self.best(x, 0, None), written + exit_caches
        return x, written + exit_caches
