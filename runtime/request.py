"""Requests to the batch, and the updates that it returns."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import check_flag, check_integer, check_number, check_type, shown
from eesd.common.errors import EESDError
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats

LOGGER = logging.getLogger(__name__)
MAX_LOGPROBS = 20
"""Maximum number of alternatives reported with a token, as in OpenAI's API."""


class QueueFullError(EESDError):
    """The queue is full. ``retry_after`` is the time in seconds after which a place is likely to be
    free."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConstraintError(EESDError):
    """A constraint cannot be followed any further. The request caused this error, not the
    server."""


class Constraint(Protocol):
    """Decides which tokens may follow, for constrained output. Each object serves one request, in
    the thread of the batch."""

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return a mask [V] of the tokens that may follow these new tokens (without the prompt). If
        it returns None, all tokens are allowed.

        Raises:
            ConstraintError: The constraint cannot be followed. The request ends with this error.
        """
        ...

    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return up to ``most`` tokens that must follow because no other tokens are allowed. They
        are a draft that costs nothing. The result may be empty.

        Raises:
            ConstraintError: The constraint cannot be followed. The request ends with this error.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate.

    Attributes:
        tokens: The prompt's ids.
        sampling: The sampling options. If they have no seed, the request draws a seed and keeps it.
        max_new_tokens: Maximum number of tokens to generate.
        stop: The text ends before any of these strings. Stop strings need a tokenizer. If a string
            is the name of a special token, the text ends at that token.
        stop_token_ids: Tokens that end the text as EOS does, even with ``ignore_eos``.
        draft: Whether to draft. If False, the request is decoded plainly.
        ignore_eos: Whether to go on after EOS.
        min_tokens: Minimum number of new tokens. Neither EOS nor a stop string ends the text
            earlier, unless the constraint allows only EOS.
        logprobs: Number of alternatives to report with each token's log-probability under the
            model. If it is None, no log-probabilities are reported.
        prompt_logprobs: Number of alternatives to report with the log-probability of each prompt
            token. The first prompt token has none.
        seconds: Time limit of the request, in seconds. When it has passed, the request ends with
            the tokens that it has.
        constraint: Restricts the tokens that may follow.
        salt: The keys and values of a request are reused only by requests with the same salt. So a
            user with another salt cannot infer from times or ``cached_tokens`` whether a text was
            seen before.

    Raises:
        EESDError: A value has the wrong type, or is out of range.
    """

    tokens: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    draft: bool = True
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seconds: float | None = None
    constraint: Constraint | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        check_type("sampling", self.sampling, Sampling, "a Sampling")
        object.__setattr__(self, "sampling", self.sampling.of_text())
        if self.constraint is not None and not (
            hasattr(self.constraint, "allowed") and hasattr(self.constraint, "forced")
        ):
            raise EESDError(
                f"constraint is {shown(self.constraint)}; give what eesd.make_constraint returns."
            )
        check_type("salt", self.salt, str, "a text")
        check_flag("draft", self.draft)
        check_flag("ignore_eos", self.ignore_eos)
        check_lengths(self.min_tokens, self.max_new_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seconds is not None:
            check_number("seconds", self.seconds, lambda x: 0 < x < 1e9, "a number above 0")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise EESDError(f"stop is {shown(self.stop)}; it must be a tuple of strings.")
        check_type("stop_token_ids", self.stop_token_ids, tuple, "a tuple of token ids")
        for token in self.stop_token_ids:
            check_integer("A stop token", token, 0, 2**63 - 1)
        if "" in self.stop:
            raise EESDError("A stop string is empty; give at least one character.")


def check_lengths(least: int, most: int) -> None:
    """Raise :class:`EESDError` unless ``most`` and ``least`` are valid as the maximum and minimum
    number of new tokens."""
    check_integer("max_new_tokens", most, 1, 2**63 - 1)
    check_integer("min_tokens", least, 0, 2**63 - 1)
    if least > most:
        raise EESDError(
            f"min_tokens is {least}, but max_new_tokens is {most}; give more new tokens, "
            "or a smaller minimum."
        )


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model (before temperature and filters). It also lists the
    most likely tokens at the same position, the most likely token first. A prompt's first token has
    no log-probability (None)."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """One new token.

    Attributes:
        token: Its id.
        text: The text that became certain with this token. It may be empty.
        source: Name of the drafter that proposed the token (``exit`` or ``text``), or ``verify`` if
            it is the verifier's bonus token.
        logprob: Log-probability, if requested.
    """

    token: int
    text: str
    source: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Update:
    """The result of one round for a request.

    Attributes:
        tokens: The new tokens. The last update may have none.
        rejected: The drafted tokens that were not accepted. They follow the accepted tokens.
        held: Text that was held back because it could have begun a stop string. Only the last
            update has it.
        finish_reason: ``stop`` (EOS or a stop string), ``length``, ``cancelled``, ``deadline``, or
            ``error``. None if further updates follow.
        error: A sentence that describes the error.
        refused: Whether the request caused the error, not the server.
        stop: The stop string that ended the text.
        prompt_logprobs: Log-probabilities of the prompt's tokens, if they were requested. Only the
            first update has them.
        cached_tokens: Number of prompt tokens whose keys and values were kept from earlier
            requests.
        stats: Counts and seconds so far.
    """

    tokens: tuple[TokenOutput, ...] = ()
    rejected: tuple[int, ...] = ()
    held: str = ""
    finish_reason: str | None = None
    error: str | None = None
    refused: bool = False
    stop: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    stats: Stats = field(default_factory=Stats)


OnUpdate = Callable[[Update], None]
"""A function that receives the updates of a request. It is called in the thread of the batch, so it
must return at once. If it raises an exception, its request ends and the other requests go on."""


class Generation:
    """A request that was accepted. ``cancel`` may be called from any thread, and more than once.

    Attributes:
        began: The ``time.monotonic()`` at which the request got a place in the batch. It is None
            while the request waits.
    """

    def __init__(self, request: Request, on_update: OnUpdate = lambda _: None) -> None:
        check_type("request", request, Request, "a Request")
        if not callable(on_update):
            raise EESDError(f"on_update is {shown(on_update)}; it must be a function.")
        self.request = request
        self._on_update = on_update
        self._ends_at = None if request.seconds is None else time.monotonic() + request.seconds
        self._cancelled = threading.Event()
        self.began: float | None = None

    def tell(self, update: Update) -> None:
        """Report an update."""
        try:
            self._on_update(update)
        except KeyboardInterrupt:
            raise
        except BaseException:
            LOGGER.exception("The on_update of a request failed; the request ends.")
            self.cancel()

    def cancel(self) -> None:
        """End the request at the next round. The finish reason is ``cancelled``, unless the request
        ends before that."""
        self._cancelled.set()

    def is_late(self, now: float) -> bool:
        """Return whether the request's deadline has passed. ``now`` is ``time.monotonic()``."""
        return self._ends_at is not None and now >= self._ends_at

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()
