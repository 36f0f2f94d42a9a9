"""Streams never show a stop string. If a chat template or a tokenizer fails, the error is one
sentence."""

import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from eesd.common.errors import EESDError
from eesd.controllers import TextStep
from eesd.runtime.decoding.text_drafter import Match, SuffixAutomaton
from eesd.runtime.text import HALF, TextCodec, TextStream

pytestmark = pytest.mark.fast

CORPUS = [
    "The quick brown fox stops here. STOP\n",
    "naïve café, déjà vu",
    "日本語の文章です",
    "def f(x):\n    return x\n",
    "🙂🙂👍",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"], exclude_characters=HALF),
    st.sampled_from("🙂👍🏽👨‍👩‍👧🇫🇷日本語한글عربىe\u0301n\u0303\u200d\ufe0f \n\t"),
    st.sampled_from("éïàç🙂"),
    st.sampled_from("naThe quick brown fox"),
)
TEXTS = st.text(CHARACTERS, max_size=30)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with a small vocabulary. Most characters beyond ASCII consist of
    several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    # A short text needs no thread pool, and a busy machine may refuse one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def codec(directory: Path) -> TextCodec:
    return TextCodec(directory)


def raw(codec: TextCodec, text: str) -> list[int]:
    return list(codec.tokenizer.encode(text, add_special_tokens=False).ids)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    text=TEXTS,
    stops=st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=3),
    data=st.data(),
)
def test_text_ends_before_a_stop_string(
    codec: TextCodec, text: str, stops: list[str], data: st.DataObject
) -> None:
    """The text is cut before the stop string that completes first, wherever one token ends and the
    next begins. Without a stop string, the whole text is kept."""
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.sampled_from(["", *stops])) + text[at:]
    tokens = raw(codec, text)
    stream = TextStream(codec, [], stops)
    shown = ""
    for count, token in enumerate(tokens, 1):
        shown += stream.push(token)
        so_far = codec.decode(tokens[:count]).rstrip(HALF)
        found = min((so_far.find(stop) for stop in stops if stop in so_far), default=None)
        assert (stream.stop is not None) == (found is not None)
        if found is not None:
            assert shown == so_far[:found]
            assert stream.push(token) == stream.finish() == ""
            return
        held = max(
            (n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])), default=0
        )
        assert shown == so_far[: len(so_far) - held]
    assert shown + stream.finish() == text


MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(directory: Path, target: Path, config: dict[str, object] | None) -> TextCodec:
    (target / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    if config is not None:
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(target)


def test_a_model_without_template_is_refused(directory: Path, tmp_path: Path) -> None:
    configs: list[dict[str, object] | None] = [
        None,
        {},
        {"chat_template": [{"name": "rag", "template": "x"}]},
    ]
    for config in configs:
        with pytest.raises(EESDError, match="no chat template; give a plain prompt"):
            chat(directory, tmp_path, config).encode(MESSAGES)


def test_damaged_files_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(EESDError, match=r"no tokenizer\.json"):
        TextCodec(tmp_path)
    chat(directory, tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(EESDError, match="not valid JSON"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EESDError, match="cannot be read"):
        TextCodec(tmp_path)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_template_of_tokens_that_names_an_unlisted_one_is_refused(
    tmp_path: Path, sequence: bool
) -> None:
    """The library would panic while encoding a text."""
    step: dict[str, Any] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    processor = {"type": "Sequence", "processors": [step]} if sequence else step
    Tokenizer(models.BPE({"<s>": 0, "a": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    document = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(EESDError, match="adds the token '<s>' to texts, but does not list it"):
        TextCodec(tmp_path)


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
DISTINCT = ["é", "€", "日", "🙂", "\u0301", "\u200d", HALF]
# Bytes that begin, continue or break characters. Space is not among them: some decoders strip it at
# the beginning of a text even as a byte, and streams show it. 0xED, the beginning of surrogates,
# has a separate test.
BYTES = [0x41, 0x0A, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xF0, 0xF4, 0xF5, 0xFF]


def byte_level_characters() -> dict[int, str]:
    """Returns the character that the library's pre-tokenizer writes for each byte of a text."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    characters = [
        chr(code)
        for code in (*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 4096))
    ]
    written = {
        byte: sign
        for c in characters
        for byte, sign in zip(c.encode(), split(c)[0][0], strict=True)
    }
    unused = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(written.values()))
    return written | dict(zip(sorted(set(range(256)) - set(written)), unused, strict=True))


BYTE_LEVEL = byte_level_characters()
SPACED = ["a", "b", "▁", "▁a", "▁▁", "▁.", "é", "日", HALF]
PIECES: dict[str, list[str]] = {
    "llama": SPACED,
    "gemma": SPACED,
    "metaspace-bytes": SPACED,
    "metaspace": SPACED,
    "wordpiece": ["a", "##b", "##é", ".", "'", "n't", "'s", "##日", HALF],
    "suffix": ["a", "b</w>", "é</w>", "</w>", HALF],
    "none": ["a", "é", ".", HALF],
    # pieces with the end of one character and the beginning of the next
    "byte-level": [
        "".join(BYTE_LEVEL[byte] for byte in data)
        for data in (b" a", b"a\xf0\x9f", b"\x99\x82b", b"\x82\xac\xe2", b"\xc3")
    ],
}
PIECES["byte-level-in-sequence"] = PIECES["byte-level"]
REPLACE = decoders.Replace("▁", " ")
FALLBACK = decoders.ByteFallback()
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: decoders.Sequence(
        [REPLACE, FALLBACK, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": lambda: decoders.Sequence([REPLACE, FALLBACK, decoders.Fuse()]),
    "metaspace-bytes": lambda: decoders.Sequence([FALLBACK, decoders.Metaspace()]),
    "metaspace": decoders.Metaspace,
    "wordpiece": decoders.WordPiece,
    "suffix": decoders.BPEDecoder,
    "none": lambda: None,
    "byte-level": decoders.ByteLevel,
    "byte-level-in-sequence": lambda: decoders.Sequence([decoders.ByteLevel()]),
}
FALLBACKS = ("llama", "gemma", "metaspace-bytes")


class Kind:
    """A tokenizer with one kind of decoder. The class knows which text its tokens mean."""

    def __init__(self, name: str, codec: TextCodec) -> None:
        self.name = name
        self.codec = codec
        self.of_bytes = (
            [self.id(BYTE_LEVEL[byte]) for byte in range(256)]
            if name.startswith("byte-level")
            else []
        )
        self.fallback = [self.id(token) for token in BYTE_TOKENS] if name in FALLBACKS else []
        byte_tokens = self.of_bytes or self.fallback
        units = [[self.id(piece)] for piece in PIECES[name]]
        units += [[self.id(token)] for token in ("<s>", "</s>", "<tool call>", "Ġé")]
        # A model's vocabulary may be larger than its tokenizer's.
        units += [[codec.tokenizer.get_vocab_size() + 5]]
        if byte_tokens:
            units += [[byte_tokens[byte]] for byte in BYTES]
            units += 2 * [
                [byte_tokens[byte] for byte in character.encode()] for character in DISTINCT
            ]
        self.tokens = st.lists(st.sampled_from(units), max_size=14).map(
            lambda drawn: [t for unit in drawn for t in unit]
        )

    def id(self, token: str) -> int:
        found = self.codec.tokenizer.token_to_id(token)
        assert found is not None
        return int(found)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text to show for all tokens. It has whole characters, and U+FFFD only for
        bytes that cannot belong to any character."""
        if self.fallback:
            return self.codec.decode(self._mended(tokens))
        text = self.codec.decode(tokens)
        return text[:-1] if self.of_bytes and unfinished(self._bytes(tokens)) else text

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of the tokens, without special tokens."""
        signs = {sign: byte for byte, sign in BYTE_LEVEL.items()}
        data = b""
        for name in (self.codec.tokenizer.id_to_token(token) for token in tokens):
            if name not in (None, "<s>", "</s>"):
                data += name.encode() if " " in name else bytes(signs[sign] for sign in name)
        return data

    def _mended(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens with each broken byte replaced by the bytes of U+FFFD. If half a
        character is at the end, it is left out.

        Decoding these tokens gives the text, because all their bytes are valid and the decoder
        drops none.
        """
        silent = (None, "<s>", "</s>")
        names = [
            name
            for token in tokens
            if (name := self.codec.tokenizer.id_to_token(token)) not in silent
        ]
        mended: list[int] = []
        while names:
            data = b""
            while len(data) < len(names) and names[len(data)] in BYTE_TOKENS:
                data += bytes([BYTE_TOKENS.index(names[len(data)])])
            if not data:
                mended.append(self.id(names.pop(0)))
                continue
            if len(data) == len(names) and unfinished(data) == data:
                break
            whole = next((data[:size] for size in range(1, 5) if is_text(data[:size])), None)
            mended += [self.fallback[byte] for byte in whole or HALF.encode()]
            del names[: len(whole or b"?")]
        return mended


def is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def unfinished(data: bytes) -> bytes:
    """Returns the last bytes if they may become a character."""
    for size in (3, 2, 1):
        try:
            data[len(data) - size :].decode()
        except UnicodeDecodeError as error:
            if len(data) >= size and error.start == 0 and error.reason == "unexpected end of data":
                return data[-size:]
    return b""


@pytest.fixture(scope="module", params=list(DECODERS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    names = ["<unk>", *(BYTE_TOKENS if request.param in FALLBACKS else []), *PIECES[request.param]]
    if request.param.startswith("byte-level"):
        names += BYTE_LEVEL.values()
    tokenizer = Tokenizer(
        models.BPE(
            {name: at for at, name in enumerate(dict.fromkeys(names))}, [], unk_token="<unk>"
        )
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("Ġé")])
    if (decoder := DECODERS[request.param]()) is not None:
        tokenizer.decoder = decoder
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer.save(str(directory / "tokenizer.json"))
    return Kind(request.param, TextCodec(directory))


@settings(derandomize=True, deadline=None, max_examples=400)
@given(data=st.data())
def test_a_cut_anywhere_changes_no_text(kind: Kind, data: st.DataObject) -> None:
    """After each token, the stream shows all text that is certain, and this text never changes.
    Texts include broken bytes, special tokens and spaces."""
    tokens = data.draw(kind.tokens)
    cut = data.draw(st.integers(0, len(tokens)))
    stream = TextStream(kind.codec, tokens[:cut], [])
    shown = kind.text(tokens[:cut])
    for count, token in enumerate(tokens[cut:], cut + 1):
        shown += stream.push(token)
        assert shown == kind.text(tokens[:count])
    assert stream.finish() == ""


@settings(derandomize=True, deadline=None, max_examples=400)
@given(data=st.data())
def test_text_without_broken_bytes_is_what_the_decoder_writes(
    kind: Kind, data: st.DataObject
) -> None:
    tokens = data.draw(kind.tokens)
    stream = TextStream(kind.codec, [], [])
    shown = "".join(stream.push(token) for token in tokens)
    whole = kind.codec.decode(tokens)
    if not kind.fallback or HALF not in whole:
        # The text may end in half a character, which is not shown.
        assert whole in (shown, shown + HALF)


def test_the_cost_of_a_token_does_not_grow(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost grows neither with the prompt nor with the number of later tokens, because a token
    is decoded together with only the previous token."""
    sizes = [0]
    decode = kind.codec.decode

    def counted(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return decode(tokens)

    monkeypatch.setattr(kind.codec, "decode", counted)
    tokens = 500 * [kind.id("<s>"), kind.id("Ġé"), *kind.fallback[0xFE:]]
    stream = TextStream(kind.codec, tokens, [])
    for token in tokens:
        stream.push(token)
    assert max(sizes) <= 2 and len(sizes) < 2 * 500 + 10


def test_a_character_of_the_prompt_comes_with_its_last_byte(kind: Kind) -> None:
    """No part of the prompt is repeated, and the cut does not break the bytes that follow."""
    euro = (
        [byte_tokens[byte] for byte in "€".encode()]
        if (byte_tokens := kind.of_bytes or kind.fallback)
        else []
    )
    for cut in range(1, len(euro)):
        stream = TextStream(kind.codec, [*euro, *euro[:cut]], [])
        assert "".join(stream.push(token) for token in [*euro[cut:], *euro, *euro]) == "€€€"


def test_halves_of_surrogates_are_broken_bytes(kind: Kind) -> None:
    for byte_tokens in (kind.of_bytes, kind.fallback):
        if byte_tokens:
            tokens = [byte_tokens[byte] for byte in b"a\xed\xa0\x80\xed\xb0b"]
            stream = TextStream(kind.codec, tokens[:2], [])
            assert "".join(stream.push(token) for token in tokens[2:]) == 5 * HALF + "b"


def test_a_space_between_prompt_and_text_is_kept(kind: Kind) -> None:
    """Decoders strip one space at the beginning of a text, even after special tokens."""
    if "▁a" in PIECES[kind.name]:
        word = kind.id("▁a")
        special = kind.id("<s>")
        first = " a" if kind.name == "gemma" else "a"
        for prompt, shown in (
            ([], first),
            ([special], first),
            ([word], " a"),
            ([word, *5 * [special]], " a"),
        ):
            stream = TextStream(kind.codec, prompt, [])
            assert stream.push(special) + stream.push(word) == shown


Text = tuple[int, ...]


def made(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    return automaton


def texts(count: int = 150, longest: int = 30) -> list[Text]:
    """Random texts over alphabets of all sizes. Texts over small alphabets repeat often."""
    random = np.random.default_rng(0)
    return [
        tuple(random.integers(1 + n % 6, size=random.integers(longest)).tolist())
        for n in range(count)
    ]


def ends(text: Text, part: Text) -> list[int]:
    """The end positions of the occurrences of a part."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def searched(text: Text, part: Text, most: int) -> list[tuple[int, TextStep]]:
    """Returns the continuation after ``part``, computed directly from the definition."""
    path: list[tuple[int, TextStep]] = []
    while len(path) < most:
        while part and ends(text, part) == [len(text)]:
            part = part[1:]
        followed = [text[end] for end in ends(text, part) if end < len(text)] if part else []
        if not followed:
            break
        token = max(followed, key=lambda one: (followed.count(one), ends(text, (*part, one))[-1]))
        path.append((token, TextStep(len(part), followed.count(token), len(followed))))
        part = (*part, token)
    return path


def test_the_longest_repeated_suffix_is_found_at_every_token() -> None:
    for text in texts():
        automaton = SuffixAutomaton()
        for end in range(len(text)):
            automaton.extend(text[end])
            so_far = text[: end + 1]
            expected = max(n for n in range(end + 1) if not n or len(ends(so_far, so_far[-n:])) > 1)
            assert automaton.repeated().length == expected


def test_continuations_are_those_of_a_search() -> None:
    compared = 0
    for text in texts():
        match = (automaton := made(text)).repeated()
        found = [step for _, step in zip(range(12), automaton.continuations(match), strict=False)]
        assert found == searched(text, text[len(text) - match.length :], 12)
        compared += len(found)
    assert compared > 500


def test_another_texts_end_is_found() -> None:
    random = np.random.default_rng(1)
    found = set()
    for text in texts():
        query = tuple(random.integers(4, size=9).tolist())
        expected = max(n for n in range(10) if not n or ends(text, query[-n:]))
        automaton = made(text)
        match = automaton.follow(Match(0, 0), query)
        found.add(expected)
        assert match.length == expected
        path = [step for _, step in zip(range(5), automaton.continuations(match), strict=False)]
        assert path == searched(text, query[9 - expected :], 5)
    assert found >= set(range(5))


@pytest.mark.parametrize("period", [1, 3, 500])
def test_a_token_costs_a_bounded_number_of_states(period: int) -> None:
    """There are at most two states per token. A repetition is continued without end."""
    automaton = made([i % period for i in range(2000)])
    assert len(automaton._next) <= 2 * 2000
    continuations = islice(automaton.continuations(automaton.repeated()), 3000)
    path = [token for token, _ in continuations]
    assert path == [(2000 + i) % period for i in range(3000)]
