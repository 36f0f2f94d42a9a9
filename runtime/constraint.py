"""Constrained output. A grammar of llguidance decides which tokens may follow.

A grammar comes from a JSON schema, a regular expression, a list of choices, or a grammar in Lark's
or GBNF's form (docs/structured-output.md). JSON is written on one line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError, refused
from eesd.common.json_input import parse_json
from eesd.common.machine import pip_install
from eesd.runtime.llm import LLM
from eesd.runtime.request import ConstraintError
from eesd.runtime.text import TextCodec, TokenBytes

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

    from eesd.runtime.json_schema import OPTIONS, ignored_by, read_schema, sentence
    from eesd.runtime.json_text import JSONTokens, Place
except ModuleNotFoundError as error:
    raise EESDError(f"Constrained output needs {error.name}; {pip_install('serve')}.") from None

LIMITS = LLParserLimits(max_lexer_states=20_000, step_max_items=5_000, verbose_errors=False)
"""The limits of one grammar. A lexer state takes 1 to 2 kB. All requests of a batch wait for the
mask of a token. With up to 5,000 items, computing a mask takes milliseconds, or a tenth of a second
if a text is very ambiguous. With 50,000 items it would take seconds. A schema of 490 properties
needs over 3,000 items. Error messages leave out the parser's state, because they go to clients."""
BLOCK = 256
"""Number of tokens that are compared in one step."""


class GrammarConstraint:
    """A :class:`~eesd.runtime.request.Constraint` that follows a grammar of llguidance.

    One matcher is used for the committed tokens and for every drafted path. Before it reads new
    tokens, it is rolled back to the prefix that they share with the tokens that it has already
    read. EOS is allowed where the grammar may end. After the end, and after tokens that the grammar
    does not allow, only EOS is allowed.

    Attributes:
        grammar: The grammar, from which another process can make an equal constraint.
        ignored: The keywords of a JSON schema that the grammar does not follow.

    Args:
        grammar: A grammar made by llguidance's ``grammar_from``.
        vocabulary: The model's tokens.
        eos: The tokens that end a text.
        json: Tokens to avoid in JSON, or None if only the grammar decides.

    Raises:
        EESDError: The grammar has a mistake, or exceeds a limit.
    """

    def __init__(
        self,
        grammar: str,
        vocabulary: LLTokenizer,
        eos: Sequence[int],
        json: JSONTokens | None = None,
    ) -> None:
        self.grammar = grammar
        self._matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        self._size = vocabulary.vocab_size
        self._eos = list(eos)
        self._only_eos = np.zeros(self._size, np.bool_)
        self._only_eos[self._eos] = True
        self._tokens: list[int] = []
        """The tokens that the matcher has read."""
        self._json = json
        self._places = [Place()]
        """The places in the JSON text before the first token and after each token."""
        if self._matcher.is_error():
            raise EESDError(
                f"The constraint cannot be used: {sentence(self._matcher.get_error())}; give "
                "another constraint."
            )
        self.ignored = frozenset(ignored_by(self._matcher.get_grammar_warnings()))

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask [V] of the tokens that may follow ``tokens``. At least one token may
        follow.

        Raises:
            ConstraintError: The grammar exceeds a limit, or nothing can follow.
        """
        if not self._read(tokens):
            return self._only_eos.copy()
        bits = self._matcher.compute_bitmask()  # this may fail because nothing can follow
        self._check()
        mask = np.unpackbits(
            np.frombuffer(bits, np.uint8), count=self._size, bitorder="little"
        ).view(np.bool_)
        count = np.count_nonzero(mask)
        if not count or (count == 1 and not self._fits(int(mask.argmax()))):
            raise ConstraintError(
                "The model has no tokens that match the constraint; give another constraint."
            )
        return self._json.without(mask, self._places[-1]) if self._json else mask

    def _fits(self, token: int) -> bool:
        """Return whether the only token of a mask may follow. (If no token may follow, llguidance's
        mask still contains one token.)"""
        if token in self._eos:
            return self._matcher.is_accepting() or self._matcher.stop_reason() == "EndOfSentence"
        return bool(self._matcher.validate_tokens([token]))

    def forced(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that spell the text that must follow. Other tokens may spell
        the same text, and the verifier decides between them.

        Raises:
            ConstraintError: The grammar exceeds a limit.
        """
        if not self._read(tokens):
            return []
        if self._matcher.is_stopped():
            return (
                self._eos[:most]
                if len(self._eos) == 1 and not (tokens and tokens[-1] in self._eos)
                else []
            )
        tokens = self._matcher.compute_ff_tokens()[:most]
        return tokens[: self._matcher.validate_tokens(tokens)]

    def _read(self, tokens: Sequence[int]) -> bool:
        """Bring the matcher to the state after ``tokens``. Returns False if the grammar does not
        allow them."""
        given = list(tokens)
        shared = _shared(self._tokens, given)
        if len(self._tokens) > shared:
            self._matcher.rollback(len(self._tokens) - shared)
            del self._tokens[shared:], self._places[shared + 1 :]
        read = self._matcher.try_consume_tokens(given[shared:])
        self._check()
        self._tokens += given[shared : shared + read]
        if self._json:
            for token in given[shared : shared + read]:
                self._places.append(self._json.after(self._places[-1], token))
        return len(self._tokens) == len(given)

    def _check(self) -> None:
        """Raise if the matcher has failed. A failed matcher ignores further tokens. Its
        ``is_stopped()`` is True, as it is at the end of a text."""
        if self._matcher.is_error():
            reason = sentence(self._matcher.get_error())
            raise ConstraintError(
                f"The constraint is too expensive, or no text matches it ({reason}); give a "
                "simpler constraint."
            )


def _shared(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    at = 0
    end = min(len(first), len(second))
    while at < end and first[at : at + BLOCK] == second[at : at + BLOCK]:
        at += BLOCK
    while at < end and first[at] == second[at]:
        at += 1
    return min(at, end)


class _Tokens:
    """Gives the bytes that each token adds to a text, in the form that llguidance requires."""

    def __init__(self, codec: TextCodec, size: int, eos: int) -> None:
        self.eos_token_id = eos
        self.bos_token_id = None
        added = codec.tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [
            token for token in sorted(added) if added[token].special and token < size
        ]
        of = TokenBytes(codec)
        # Decoders drop a space at the start of a text. An answer follows a prompt, so it does not
        # start the text.
        letter = next((token for token in range(size) if of.added(token, None).isalpha()), None)
        self.tokens = [of.added(token, letter) for token in range(size)]
        for token in self.special_token_ids:
            self.tokens[token] = added[token].content.encode()
        self._encode = codec.tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens in llguidance's form, and the tokens to avoid in JSON."""

    tokens: LLTokenizer

    @cached_property
    def json(self) -> JSONTokens:
        return JSONTokens(self.tokens)


_vocabularies: WeakKeyDictionary[TextCodec, Vocabulary] = WeakKeyDictionary()
_making = Lock()


def vocabulary_of(llm: LLM) -> Vocabulary:
    """Return the model's tokens in llguidance's form. They are computed once per model, because
    this takes a fraction of a second.

    Raises:
        EESDError: The model has no tokenizer, or llguidance cannot use the tokenizer.
    """
    codec = llm.codec
    with _making:
        if codec not in _vocabularies:
            size = llm.manifest.geometry.vocab_size
            eos = list(llm.manifest.eos_token_ids)
            if not eos:
                raise EESDError(
                    "This model has no EOS token, so constrained output could not end; leave "
                    "the constraint out."
                )
            with refused(
                lambda error: (
                    f"This model's tokenizer allows no constrained output ({sentence(str(error))})."
                )
            ):
                tokens = LLTokenizer(TokenizerWrapper(_Tokens(codec, size, eos[0])), size, eos)
            _vocabularies[codec] = Vocabulary(tokens)
        return _vocabularies[codec]


def make_constraint(kind: str, value: Any, llm: LLM, *, lenient: bool = False) -> GrammarConstraint:
    """Make a constraint.

    Args:
        kind: The kind of constraint. It is ``json`` (``value`` is a JSON schema, or its text),
            ``regex``, ``choice`` (``value`` is a list of texts), or ``grammar``.
        value: The allowed text, in the form of ``kind``.
        llm: The model.
        lenient: Whether to ignore unsupported keywords of a JSON schema instead of refusing the
            schema.

    Raises:
        EESDError: The value has a mistake.
    """
    if kind != "json":
        return of_grammar(_grammar(kind, value), llm)
    _, grammar, left_out = read_schema(_schema(value), lenient)
    made = of_grammar(grammar, llm)
    made.ignored |= left_out
    return made


def of_grammar(grammar: str, llm: LLM) -> GrammarConstraint:
    """Return the constraint for a :attr:`GrammarConstraint.grammar`.

    Raises:
        EESDError: The grammar has a mistake, or exceeds a limit.
    """
    vocabulary = vocabulary_of(llm)
    # Such a grammar was made from a JSON schema, not written by a user.
    json_tokens = vocabulary.json if OPTIONS in grammar else None
    return GrammarConstraint(grammar, vocabulary.tokens, llm.manifest.eos_token_ids, json_tokens)


def with_answer(grammar: str, answer: GrammarConstraint, llm: LLM) -> GrammarConstraint:
    """Return the constraint of a grammar in Lark's form, in which ``@answer`` is the grammar of
    another constraint.

    Raises:
        EESDError: The grammar has a mistake, or exceeds a limit.
    """
    parts = [{"lark_grammar": answer.grammar}]
    if answer.grammar.startswith("{"):
        parts = json.loads(answer.grammar)["grammars"]
    parts = [{"lark_grammar": grammar}, {**parts[0], "name": "answer"}, *parts[1:]]
    made = of_grammar(json.dumps({"grammars": parts}), llm)
    made.ignored |= answer.ignored
    return made


def _grammar(kind: str, value: Any) -> str:
    if kind == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(text, str) for text in value)
        ):
            raise EESDError("The choices must be a list of texts; give at least one text.")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted(text) for text in value))
    text = _text(f"The {kind}", value)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise EESDError(
            f"The grammar cannot be used: {sentence(str(error))}; give it in Lark's or GBNF's form."
        ) from None


def quoted(text: str) -> str:
    """Return a text as a literal in Lark."""
    return json.dumps(_text("A text of the grammar", text), ensure_ascii=False)


def _text(name: str, value: Any) -> str:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise EESDError(f"{name} is not valid Unicode text; give valid text.") from None
    return str(value)


def _schema(value: Any) -> dict[str, Any] | bool:
    """Return a JSON schema. The value is written as JSON and parsed again, so that deep nesting is
    refused."""
    remedy = "give a JSON schema"
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        schema = parse_json(_text("The JSON schema", text), "The JSON schema", remedy)
        if not isinstance(schema, dict | bool):
            raise EESDError(
                f"The JSON schema is {type(schema).__name__}; {remedy}, which is an object."
            )
        json.dumps(schema, allow_nan=False)
        return schema
    except (TypeError, ValueError, RecursionError):
        raise EESDError(
            f"The JSON schema is not plain JSON, or is nested too deeply; {remedy}."
        ) from None
