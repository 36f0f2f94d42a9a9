"""Streaming gives the correct text from any cut between prompt and generation, with every kind of
decoder."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eesd.runtime.text import HALF, TextCodec, TextStream

pytestmark = pytest.mark.fast

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = ["é", "€", "日", "🙂", "\u0301", "\u200d", HALF]
# Bytes that begin, continue or break characters. Space is not among them: some decoders strip it at
# the beginning of a text even as a byte, and streams show it. 0xED, the beginning of surrogates,
# has a separate test.
BYTES = [0x41, 0x0A, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xF0, 0xF4, 0xF5, 0xFF]


def byte_level_characters() -> dict[int, str]:
    """The letters of the library's pre-tokenizer for each byte of a text."""
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
    """A tokenizer with one kind of decoder, and the meaning of its tokens."""

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
                [byte_tokens[byte] for byte in character.encode()] for character in CHARACTERS
            ]
        self.tokens = st.lists(st.sampled_from(units), max_size=14).map(
            lambda drawn: [t for unit in drawn for t in unit]
        )

    def id(self, token: str) -> int:
        found = self.codec.tokenizer.token_to_id(token)
        assert found is not None
        return int(found)

    def text(self, tokens: Sequence[int]) -> str:
        """The text to show for all tokens: whole characters, and U+FFFD only for bytes that can
        belong to none."""
        if self.fallback:
            return self.codec.decode(self._mended(tokens))
        text = self.codec.decode(tokens)
        return text[:-1] if self.of_bytes and unfinished(self._bytes(tokens)) else text

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        """The bytes of the byte-level tokens at the end."""
        signs = {sign: byte for byte, sign in BYTE_LEVEL.items()}
        data = b""
        for name in (self.codec.tokenizer.id_to_token(token) for token in tokens):
            if name not in (None, "<s>", "</s>"):
                data += name.encode() if " " in name else bytes(signs[sign] for sign in name)
        return data

    def _mended(self, tokens: Sequence[int]) -> list[int]:
        """The tokens with the bytes of U+FFFD instead of each broken byte, and without half a
        character at the end.

        The decoder's result for them is the text: all bytes are valid, so it drops none.
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
    """The end of the bytes, if it may become a character."""
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
    """After each token, all certain text is shown, and never changes, including broken bytes,
    special tokens and spaces."""
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
    """Neither with the prompt nor with the tokens since then: a token is decoded together with the
    previous one."""
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
    """Nothing of the prompt is repeated, and the cut does not break the bytes that follow."""
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
