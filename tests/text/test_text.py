"""Text as it streams: whole characters only, stop strings never shown. Chat templates that fail."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from eesd.common.errors import EESDError
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
    """A byte-level BPE tokenizer that knows little: most characters beyond ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    with pytest.MonkeyPatch.context() as patch:  # so little text needs no pool of threads, and a full machine may refuse one
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def codec(directory: Path) -> TextCodec:
    return TextCodec(directory)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A tokenizer as Llama 2 has it: words begin with a mark, unknown characters fall back to bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzTé日"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    directory = tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(directory / "tokenizer.json"))
    return TextCodec(directory)


def pieces(codec: TextCodec, prompt: list[int], tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(codec, prompt, stop)
    return [*(stream.push(token) for token in tokens), stream.finish()]


def raw(codec: TextCodec, text: str) -> list[int]:
    return list(codec.tokenizer.encode(text, add_special_tokens=False).ids)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(prompt=TEXTS, text=TEXTS)
def test_pieces_make_up_the_text(codec: TextCodec, prompt: str, text: str) -> None:
    shown = pieces(codec, codec.encode(prompt), raw(codec, text))
    assert "".join(shown) == text == codec.decode(raw(codec, text))
    assert not any(HALF in piece for piece in shown)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(prompt=TEXTS, text=TEXTS)
def test_sentencepiece_pieces_make_up_the_text(sentencepiece: TextCodec, prompt: str, text: str) -> None:
    """Spaces between prompt and text included, which a decoder that strips them would lose."""
    prompt = "a" + prompt
    shown = pieces(
        sentencepiece, sentencepiece.encode(prompt), sentencepiece.encode(prompt + text)[len(raw(sentencepiece, prompt)) :]
    )
    assert "".join(shown) == text
    assert not any(HALF in piece for piece in shown)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(text=TEXTS, data=st.data())
def test_any_cut_shows_whole_characters(codec: TextCodec, text: str, data: st.DataObject) -> None:
    """A generation may end, and a prompt may end, in the middle of a character."""
    tokens = raw(codec, text)
    first = data.draw(st.integers(0, len(tokens)))
    last = data.draw(st.integers(first, len(tokens)))
    before = codec.decode(tokens[:first]).rstrip(HALF)
    shown = pieces(codec, tokens[:first], tokens[first:last])
    assert before + "".join(shown) == codec.decode(tokens[:last]).rstrip(HALF)
    assert text.startswith(before + "".join(shown))


def test_half_a_character_at_the_end_is_not_shown(codec: TextCodec) -> None:
    emoji = raw(codec, "\U0001f9ff")
    assert len(emoji) > 2
    for cut in range(1, len(emoji)):
        assert "".join(pieces(codec, codec.encode("x"), raw(codec, "ok ") + emoji[:cut])) == "ok "


def test_bytes_that_are_no_text_do_not_raise(codec: TextCodec) -> None:
    """A model may well emit broken bytes: they show as what they are, once something whole follows."""
    emoji = raw(codec, "\U0001f9ff")
    shown = pieces(codec, codec.encode("x"), [*emoji[:2], *raw(codec, "ab")])
    assert shown[:2] == ["", ""]
    assert "".join(shown) == HALF + "ab"


def test_a_broken_byte_behind_whole_characters(sentencepiece: TextCodec) -> None:
    """The decoder gives up a whole run of bytes for one that is broken; a stream shows all characters, as SentencePiece."""
    euro, broken, x = [3 + byte for byte in "€".encode()], 3 + 0xFF, sentencepiece.encode("x")[1:]
    assert sentencepiece.decode(euro) == "€" and sentencepiece.decode([*euro, broken]) == HALF * 4
    assert pieces(sentencepiece, sentencepiece.encode("a"), [*euro, broken, *euro, broken, *x]) == [
        *("", "", "€"),
        HALF,
        *("", "", "€"),
        HALF,
        "x",
        "",
    ]


def test_what_stands_before_half_a_character_is_shown(codec: TextCodec) -> None:
    """Tokens may hold a letter and the first byte of the next."""
    tokens = raw(codec, "naà")
    assert codec.decode(tokens[:-1]) == "na" + HALF and len(tokens) == 2
    assert pieces(codec, codec.encode("x"), tokens[:-1]) == ["na", ""]


def test_special_tokens_are_not_text(codec: TextCodec) -> None:
    assert "".join(pieces(codec, [0], [*raw(codec, "a"), 1, 3, *raw(codec, "b")])) == "ab"
    assert codec.encode("a")[0] == 0
    assert codec.decode(codec.encode("a")) == "a"


@settings(derandomize=True, deadline=None, max_examples=300)
@given(text=TEXTS, stops=st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=3), data=st.data())
def test_text_ends_before_a_stop_string(codec: TextCodec, text: str, stops: list[str], data: st.DataObject) -> None:
    """Cut before the stop string that completes first, wherever the tokens' borders are; all of the text without one."""
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.sampled_from(["", *stops])) + text[at:]
    tokens, stream, shown = raw(codec, text), TextStream(codec, [], stops), ""
    for count, token in enumerate(tokens, 1):
        shown += stream.push(token)
        so_far = codec.decode(tokens[:count]).rstrip(HALF)
        found = min((so_far.find(stop) for stop in stops if stop in so_far), default=None)
        assert (stream.stop is not None) == (found is not None)
        if found is not None:
            assert shown == so_far[:found]
            assert stream.push(token) == stream.finish() == ""
            return
        held = max((n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])), default=0)
        assert shown == so_far[: len(so_far) - held]
    assert shown + stream.finish() == text


def test_held_text_is_released_when_the_stop_does_not_come(codec: TextCodec) -> None:
    stream = TextStream(codec, codec.encode("x"), ["STOP!"])
    shown = [stream.push(token) for token in raw(codec, "a STO")]
    assert "".join(shown) == "a "
    assert stream.finish() == "STO" and stream.finish() == "" and not stream.stop
    stream = TextStream(codec, codec.encode("x"), ["STOP!"])
    assert "".join(stream.push(token) for token in raw(codec, "STOP it")) == "STOP it"


def test_the_longest_possible_beginning_is_held(codec: TextCodec) -> None:
    stream = TextStream(codec, [], ["aab", "b!"])
    assert [stream.push(token) for token in raw(codec, "a") * 3] == ["", "", "a"]
    assert stream.push(raw(codec, "b")[0]) == "" and stream.stop


MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(directory: Path, target: Path, config: dict[str, object] | None) -> TextCodec:
    (target / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    if config is not None:
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(target)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('unknown role ' + messages[0].role) }}", "unknown role tool"),
        ("{% for m in messages %}{{ m.content }}", "chat template"),
        ("{{ messages[0].tool_calls.name }}", "no attribute 'tool_calls'"),
        ("{{ 'a' + messages }}", "can only concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
    ids=["refused", "syntax", "undefined", "type", "sandbox"],
)
def test_a_template_that_fails_is_one_sentence(directory: Path, tmp_path: Path, template: str, message: str) -> None:
    codec = chat(directory, tmp_path, {"chat_template": template})
    with pytest.raises(EESDError, match=message):
        codec.render([{"role": "tool", "content": "x"}])


def test_a_model_without_template_is_refused(directory: Path, tmp_path: Path) -> None:
    configs: list[dict[str, object] | None] = [None, {}, {"chat_template": [{"name": "rag", "template": "x"}]}]
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
def test_a_template_of_tokens_that_names_an_unlisted_one_is_refused(tmp_path: Path, sequence: bool) -> None:
    """The library would panic when it encodes a text."""
    step: dict[str, Any] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}
    step |= {"special_tokens": {}}
    processor = {"type": "Sequence", "processors": [step]} if sequence else step
    Tokenizer(models.BPE({"<s>": 0, "a": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    document = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(EESDError, match="adds the token '<s>' to texts, but does not list it"):
        TextCodec(tmp_path)
