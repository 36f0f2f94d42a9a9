"""Read ``tekken.json``, the tokenizer in Mistral's format. It has byte sequences in the order of
their merges, a rule for cutting texts, and special tokens, whose ids come before all others."""

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from eesd.common.byte_level import BYTES
from eesd.model.gguf_ties import cuts

TEKKEN_FILE = "tekken.json"
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LETTERS = {byte: letter for letter, byte in BYTES.items()}


def tekken_tokenizer(source: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that transformers makes from the file. No token is added before or after
    a text.

    Raises:
        Exception: The file is damaged. The type of the exception varies.
    """
    config = source["config"]
    special = [token["token_str"] for token in sorted(source["special_tokens"], key=_rank)]
    count = config.get("default_num_special_tokens", len(special))
    special += [f"<SPECIAL_{index}>" for index in range(len(special), count)]
    kept = source["vocab"]
    if config.get("default_vocab_size") is not None:
        kept = kept[: config["default_vocab_size"] - count]
    ranks = {b64decode(token["token_bytes"]): rank for rank, token in enumerate(kept)}
    spelled = {token: "".join(_LETTERS[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in ranks:
        pairs = [pair for pair in cuts(token) if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in pairs]
    vocabulary = {spelled[token]: count + rank for token, rank in ranks.items()}
    vocabulary |= {token: index for index, token in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, _BYTES])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _rank(token: Mapping[str, Any]) -> int:
    return int(token["rank"])
