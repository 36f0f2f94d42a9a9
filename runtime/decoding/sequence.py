"""A sequence of tokens over its KV cache, which rounds read and commit to."""

import time
from collections.abc import Callable, Sequence

from eesd.common.errors import EESDError
from eesd.runtime.decoding.draft_tree import Node, is_chain, tree_mask
from eesd.runtime.decoding.drafting import Drafting
from eesd.runtime.decoding.samplers import SpecSampler
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.decoding.text_drafter import TextIndex
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Call, KVCache, Logits, StepOutputs

LOGIT_CHUNK = 64
"""Maximum number of prompt tokens whose logits are in memory at the same time."""

Observer = Callable[[Sequence[int], Logits], None]
"""Called after each round with its committed tokens and the verifier's logits before each of them
[tokens, V]. The logits are valid only during the call. Without an observer they may stay on the
device."""


class TokenSequence:
    """Tokens, their KV cache, and the state of decoding. Subclasses add the rules that end a text.

    The last token is the **root** of the next round, in the slot ``len(tokens) - 1``. The slots
    before it hold the keys and values of all other tokens, once the prompt is prefilled.

    Attributes:
        tokens: The prompt and all committed tokens. Set by each commit.
        stats: Counts and seconds so far. Set by each commit; prefill adds its seconds.
        finish_reason: None until a commit ends the sequence; see :class:`RoundResult`.
        engines: The engines that run its calls. Set by the constructor.
        manifest: Manifest of the engine directory. Set by the constructor.
        drafting: The drafters of this sequence when it runs alone. Set by the constructor.
        sampler: The sampler that chooses its tokens. Set by the constructor.
        index: Index that finds repetitions in the tokens. Extended by each round.
        observer: Called after each commit; None if nobody reads the logits.
        drafted_to: End of the slots with drafted tokens that verify has not overwritten. Set by
            draft steps, and reset to 0 by each commit.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        kv_cache: KVCache,
        engines: Engines,
        drafting: Drafting,
        sampler: SpecSampler,
        most: int,
        observer: Observer | None = None,
    ) -> None:
        """Begin a sequence.

        Args:
            tokens: The prompt, not empty.
            kv_cache: An empty cache.
            engines: The engines that run its calls.
            drafting: The drafters of this sequence when it runs alone.
            sampler: Chooses tokens.
            most: Maximum number of new tokens.
            observer: Called after each commit.
        """
        self.tokens = list(tokens)
        self.stats = Stats(prompt_tokens=len(tokens), exact=engines.exact)
        self.finish_reason: str | None = None
        self.engines = engines
        self.manifest = engines.verify.manifest
        self.drafting = drafting
        self.sampler = sampler
        self.index = TextIndex()
        self.observer = observer
        self.drafted_to = 0
        self._most = most
        self._kv_cache = kv_cache
        self._closed = False
        self._prefilled = 0
        self._target = len(tokens) - 1
        self._scored = 0
        """Number of prompt tokens whose logits were computed, if ``_to_score`` is not 0."""
        self._to_score = 0
        """Number of prompt tokens whose logits are wanted."""

    # The prompt

    def prefill(self) -> None:
        """Put all tokens of the prompt except the last into the cache. The first round does this if
        the caller did not. The last token is the first root, so prefill needs no logits."""
        while (piece := self.next_piece(self.engines.verify.prefill_chunk)) is not None:
            started = time.perf_counter()
            with self.engines.span("prefill"):
                [outputs] = self.engines.verify.forward([piece])
            self.add_piece(piece, outputs, time.perf_counter() - started)

    def next_piece(self, most: int) -> Call | None:
        """The call of the next piece of the prompt, at most ``most`` tokens; None if the prompt is
        complete."""
        self.check_open()
        start = self._prefilled
        logits = self._scored < self._to_score
        most = min(most, self.engines.verify.prefill_chunk)
        stop = min(start + most, self._target)
        if logits:
            stop = min(start + most, start + LOGIT_CHUNK, self._to_score)
        if start == stop:
            return None
        self._kv_cache.reserve(stop)
        return Call(
            self._kv_cache, self.tokens[start:stop], range(start, stop), start, logits=logits
        )

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        """Record that the call of a piece of the prompt is done, and took ``seconds``."""
        self._prefilled = piece.slot + len(piece.tokens)
        self.stats.prefill_seconds += seconds

    @property
    def unfilled(self) -> int:
        """Number of tokens that are not in the cache yet: of the prompt, or of a text that was
        moved."""
        return self._target - self._prefilled

    # Rounds

    def call(self, nodes: Sequence[Node], first: int = 0) -> Call:
        """The engine call for the nodes from ``first`` on, each in the slot ``node.index`` after
        the root's."""
        root = len(self.tokens) - 1
        called = nodes[first:]
        tokens = [node.token for node in called]
        positions = [root + node.depth for node in called]
        if is_chain(nodes):
            return Call(self._kv_cache, tokens, positions, root + first)
        return Call(self._kv_cache, tokens, positions, root + first, root, tree_mask(nodes, first))

    def verified(self, nodes: Sequence[Node]) -> Call:
        """The verify call for nodes. It also clears slots of the draft beyond these nodes."""
        stop = len(self.tokens) - 1 + len(nodes)
        if self.drafted_to > stop:
            self._kv_cache.clear(stop, self.drafted_to)
        return self.call(nodes)

    @property
    def left(self) -> int:
        """Maximum number of further tokens."""
        return min(self._most - self.stats.new_tokens, self.manifest.max_seq_len - len(self.tokens))

    def forced(self, most: int) -> Sequence[int]:
        """At most ``most`` tokens that must follow because no others are allowed: a draft without
        cost."""
        return ()

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Number of these next tokens that belong to the text; None if it does not end within
        them."""
        return None

    # The cache

    @property
    def kv_cache(self) -> KVCache:
        """The cache, for calls of other engines. Raises :class:`EESDError` on a closed sequence."""
        self.check_open()
        return self._kv_cache

    def close(self) -> KVCache:
        """Give up the cache and return it, so that the next sequence can use it. ``tokens``,
        ``stats`` and ``finish_reason`` remain."""
        self._closed = True
        return self._kv_cache

    def check_open(self) -> None:
        """Raise :class:`EESDError` if the sequence is closed."""
        if self._closed:
            raise EESDError(
                "The session is closed, and its KV cache belongs to the next one; start a new "
                "session."
            )
