"""The tokenizer of a GGUF file, as llama.cpp reads it.

It is made from the metadata alone, so the token ids do not depend on transformers' support for GGUF
files.
"""

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.model.fields import Fields
from eesd.model.gguf_file import GgufFile
from eesd.model.gguf_pre_tokenizers import (
    BEGINS,
    PRE_TOKENIZERS,
    WHOLE_PIECES,
    WITH_ESCAPED_SPACES,
)
from eesd.model.gguf_special import (
    CONTROL,
    CONTROL_NAMES,
    UNKNOWN,
    USER_DEFINED,
    end_tokens,
    token_types,
    values,
)
from eesd.model.gguf_ties import check_ties, cuts

_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "\u2581"
"""The spelling of a space in SentencePiece vocabularies."""
_TO_TEXT = (decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse())
_SPM_DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}


def gguf_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, str]]:
    """Make the tokenizer of a GGUF file.

    Args:
        file: The file, with ``tokenizer.ggml.tokens``.

    Returns:
        The tokenizer, and the special tokens by the names that they have in
        ``tokenizer_config.json``.

    Raises:
        EESDError: The kind of tokenizer or its rule is unknown, or the metadata are damaged.
    """
    try:
        return _tokenizer(Fields(file.metadata))
    except (KeyError, ValueError) as error:
        reason = f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else error
        raise EESDError(f"The tokenizer in {file.path} cannot be used: {reason}.") from None


def _tokenizer(fields: Fields) -> tuple[Tokenizer, dict[str, str]]:
    tokens = [
        token or f"[EMPTY_{index}]" for index, token in enumerate(values(fields, "tokens", str))
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ValueError(f"the token {shown(twice)} is in its vocabulary twice")
    kind = fields.text("tokenizer.ggml.model")
    sentencepiece = kind == "llama"
    special = _special(fields, tokens, _SPM_DEFAULTS if sentencepiece else {})
    added = _added_tokens(fields, tokens)
    if sentencepiece:
        tokenizer = _sentencepiece(fields, vocabulary, special, added)
    elif kind == "gpt2":
        tokenizer = _byte_level(fields, vocabulary)
    elif kind == "gemma4":
        tokenizer = _escaped_spaces(fields, vocabulary)
    else:
        raise ValueError(f"its kind is {shown(kind)}; supported are gpt2, llama and gemma4")
    tokenizer.add_tokens(added)
    begin = fields.flag(
        "tokenizer.ggml.add_bos_token",
        sentencepiece or fields.raw.get("tokenizer.ggml.pre") in BEGINS,
    )
    begin = begin or kind == "gemma4"  # whatever the file says
    end = fields.flag("tokenizer.ggml.add_eos_token")
    template = ["$A"]
    for wanted, name, place in ((begin, "bos_token", 0), (end, "eos_token", 2)):
        if wanted and name not in special:
            raise ValueError(f"texts get its {name.replace('_', ' ')}, which it does not name")
        if wanted:
            template.insert(place, name)
    if begin or end:
        pieces = [
            {"id": name, "ids": [vocabulary[text]], "tokens": [text]}
            for name, text in special.items()
        ]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=pieces
        )
    return tokenizer, special


def _special(fields: Fields, tokens: Sequence[str], defaults: dict[str, int]) -> dict[str, str]:
    found = {}
    for name, own in _SPECIAL.items():
        default = defaults.get(name)
        key = f"tokenizer.ggml.{own}_token_id"
        index = fields.integer(key, default, optional=True, least=0, most=len(tokens) - 1)
        if index is not None:
            found[name] = tokens[index]
    return found


def _byte_level(fields: Fields, vocabulary: dict[str, int]) -> Tokenizer:
    """Make a tokenizer of byte-level BPE. The bytes of the text are spelled as characters, and
    tokens are merged within pieces of the text."""
    name = fields.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"its tokenizer.ggml.pre is {shown(name)}, and a text can be cut only by a known "
            "rule; if you know the right one, "
            "write it with: gguf-new-metadata --pre-tokenizer NAME IN OUT"
        )
    merges = _merges(fields, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in WHOLE_PIECES))
    cuts = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in PRE_TOKENIZERS[name]]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(fields: Fields, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}
    for merge in values(fields, "merges", str):
        cut = merge.find(" ", 1)
        pair = (merge[:cut], merge[cut + 1 :])
        if cut < 0 or not vocabulary.keys() >= {*pair, "".join(pair)}:
            raise ValueError(f"the merge {shown(merge)} is not one of tokens to a token")
        merges[pair] = None  # the first occurrence counts
    return list(merges)


def _escaped_spaces(fields: Fields, vocabulary: dict[str, int]) -> Tokenizer:
    """Make the tokenizer of Gemma 4. Spaces are spelled as another character, and characters
    without a token as bytes."""
    model = models.BPE(vocabulary, _merges(fields, vocabulary), byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WITH_ESCAPED_SPACES), "isolated")
    tokenizer.decoder = decoders.Sequence([*_TO_TEXT])
    return tokenizer


def _sentencepiece(
    fields: Fields,
    vocabulary: dict[str, int],
    special: dict[str, str],
    added: Sequence[AddedToken],
) -> Tokenizer:
    """Make a tokenizer of SentencePiece BPE. The neighbours that form the token with the best score
    are merged first."""
    scores = values(fields, "scores", float, int)
    if len(scores) < len(vocabulary):
        raise ValueError(f"it has {len(scores)} scores for {len(vocabulary)} tokens")
    merges = []
    for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]]):
        merges += [cut for cut in cuts(token) if cut[0] in vocabulary and cut[1] in vocabulary]
    model = models.BPE(
        vocabulary, merges, unk_token=special["unk_token"], fuse_unk=True, byte_fallback=True
    )
    found_before = {token.content for token in added}
    check_ties(
        {token: scores[at] for token, at in vocabulary.items() if token not in found_before}, model
    )
    tokenizer = Tokenizer(model)
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [*_TO_TEXT]
    tokenizer.normalizer = spaces
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _added_tokens(fields: Fields, tokens: Sequence[str]) -> list[AddedToken]:
    """Return the control tokens and the user-defined tokens, which are found in a text before it is
    cut. Only control tokens are special, that is, hidden in output."""
    types = token_types(fields, tokens)
    ends = end_tokens(fields)
    model = (fields.text("general.name") or "").lower()
    stripped = "phi-3" in model or "phi3" in model
    return [
        AddedToken(
            token,
            rstrip=stripped and token not in _NOT_STRIPPED,
            normalized=False,
            special=kind in (UNKNOWN, CONTROL) or index in ends,
        )
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or token in CONTROL_NAMES or index in ends
    ]
