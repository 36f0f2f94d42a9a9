"""The torch modules of the graphs: **draft** (the first N layers and the exit head) and **verify**
(the model). ``common/architecture.py`` describes their computations.

Both modules have the same inputs. Their caches are in the order of the caches' indices.

The verify module computes logits only for the tokens that its caller selects, because most prompt
tokens need no logits, and the LM head is a large part of a small model.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from eesd.common.architecture import Model, draft, verify
from eesd.common.shapes import graph_needs
from eesd.model.decoder import Decoder, ExitHead
from eesd.model.torch_ops import KV, Add, Inputs, TorchOperations


class Graph(nn.Module):
    """The modules of the draft or verify graph, with an engine's kernels.

    Attributes:
        described: The description of the model.
        operations: The table of operations. An engine may replace this table and the following
            attributes.
        best: A function that returns an engine's results for its callers. Its arguments are the
            logits [B, n, V] (of any type), K, and a draft vocabulary
            (:func:`~eesd.runtime.engines.torch_fused.find_best`). If it is None, operators of torch
            compute the results from float32 logits.
        unmasked: Largest number of tokens of a sequence for which attention derives the mask.

    Args:
        decoder: The base model.
        head: The exit head.
        layers: The base layers of the verify graph or of a stage, or None for the draft graph.
        add_ranks: A function that adds the parts of all ranks. It is None if one process has all
            weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: ExitHead,
        layers: range | None,
        add_ranks: Add | None,
    ) -> None:
        super().__init__()
        self.model = decoder.model
        self.lm_head = decoder.lm_head
        if decoder.geometry.logit_bias:
            self.logit_bias = decoder.logit_bias
        self.exit_head = head
        self.described = Model(decoder.geometry, head.exit_config)
        self.operations = TorchOperations
        self.best: Callable[[Tensor, int, Tensor | None], Tensor] | None = None
        self.unmasked = 0
        self._caches = sorted(graph_needs(*self.described, layers).caches)
        self._add_ranks = add_ranks

    def _pass(self, inputs: Inputs, caches: Sequence[KV]) -> TorchOperations:
        """Return the operations of a pass with these caches. Masks are computed again, because the
        inputs' memory may hold new values."""
        given = dict(zip(self._caches, caches, strict=True))
        own = inputs.anew()
        return self.operations(
            self.described, self.get_submodule, own, given, self._add_ranks, self.best is None
        )


class Draft(Graph):
    """The first N layers and the exit head. A head without blocks uses the model's LM head, whose
    logits have a cap. With a draft vocabulary, the head has a separate LM head.

    Args:
        decoder: The base model.
        head: The exit head.
        top_k: K, the number of candidates to return for each token.
        add_ranks: See :class:`Graph`.
    """

    def __init__(
        self, decoder: Decoder, head: ExitHead, top_k: int, add_ranks: Add | None = None
    ) -> None:
        super().__init__(decoder, head, None, add_ranks)
        assert head.draft_vocab is None or head.lm_head is not None
        self.top_k = top_k

    def forward(
        self, input_ids: Tensor, inputs: Inputs, caches: Sequence[KV]
    ) -> tuple[*tuple[Tensor, ...], list[KV]]:
        """Run a draft step.

        Args:
            input_ids: Token ids [B, n].
            inputs: Shared inputs of the layers.
            caches: The caches 0 .. N-1 and the caches of the exit head.

        Returns:
            The logits in float32 ([B, n, V], or [B, n, Vd] with a draft vocabulary), the ids and
            the log-probabilities of the K most likely tokens (each [B, n, K], most likely first),
            and the written caches. The ids refer to the whole vocabulary. If :attr:`best` is set,
            the logits have the model's type, and one tensor holds both the ids and the
            log-probabilities.
        """
        o = self._pass(inputs, caches)
        logits = draft(o, self.described, input_ids)
        written = [*o.caches.values()]
        draft_vocab = self.exit_head.draft_vocab
        if self.best is not None:
            return logits, self.best(logits, self.top_k, draft_vocab), written
        values, columns = torch.topk(logits, self.top_k)
        logprobs = values - torch.logsumexp(logits, -1, keepdim=True)
        tokens = columns if draft_vocab is None else draft_vocab[columns]
        return logits, tokens, logprobs, written


class Verify(Graph):
    """The whole model, or one stage of it.

    Args:
        decoder: The base model.
        head: The exit head, whose caches the pass also writes.
        layers: The layers of the stage, or None for all layers.
        add_ranks: See :class:`Graph`.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: ExitHead,
        layers: range | None = None,
        add_ranks: Add | None = None,
    ) -> None:
        if layers is None:
            layers = range(decoder.geometry.num_layers)
        super().__init__(decoder, head, layers, add_ranks)
        self.layers = layers

    def forward(
        self, x: Tensor, inputs: Inputs, caches: Sequence[KV]
    ) -> tuple[*tuple[Tensor, ...], list[KV]]:
        """Run a verify pass.

        Args:
            x: The token ids [B, n] for the first stage. Later stages get the hidden state
                [B, n, hidden] of the previous stage.
            inputs: Shared inputs of the layers.
            caches: The caches of the stage's layers. For the first stage, they include the caches
                of the exit head.

        Returns:
            The result of the stage and the written caches. The last stage returns the logits
            [B, R, V] (float32) of the tokens ``inputs.logit_rows``. Earlier stages return the
            hidden state [B, n, hidden]. If :attr:`best` is set, the last stage's logits have the
            model's type, and the result of :attr:`best` follows them.
        """
        o = self._pass(inputs, caches)
        x = verify(o, self.described, x, self.layers)
        written = [*o.caches.values()]
        if self.best is None or self.layers.stop < self.described.geometry.num_layers:
            return x, written
        return x, self.best(x, 0, None), written
