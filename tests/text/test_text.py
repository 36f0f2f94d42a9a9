"""Streams never show a stop string. Failures of chat templates and tokenizers end in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
    """A byte-level BPE tokenizer with a small vocabulary: most characters beyond ASCII are several
    tokens."""
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
    """Cut before the stop string that completes first, wherever the tokens' borders are. Without
    one, the whole text."""
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
    }
    step |= {"special_tokens": {}}
    processor = {"type": "Sequence", "processors": [step]} if sequence else step
    Tokenizer(models.BPE({"<s>": 0, "a": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    document = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(EESDError, match="adds the token '<s>' to texts, but does not list it"):
        TextCodec(tmp_path)
