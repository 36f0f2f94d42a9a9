"""Fill-in-the-middle prompts. They use the special tokens on which code models were trained."""

from eesd.common.errors import EESDError
from eesd.runtime.text import TextCodec

MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    # DeepSeek-Coder.
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Each entry has the marks that come before the prefix, before the suffix, and before the middle
(Bavarian et al. 2022, https://arxiv.org/abs/2207.14255)."""

_ENDS = {
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "\u2581<EOT>"),
    *("<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}.union(*MARKS)
"""Marks that models write after the middle. Not all models list their mark as an EOS token."""


def ends_between(codec: TextCodec) -> list[int]:
    """Return the tokens that end the middle of a text in addition to the EOS tokens."""
    found = map(codec.tokenizer.token_to_id, sorted(_ENDS))
    return [token for token in found if token is not None]


def fill_in(before: str, behind: str, codec: TextCodec) -> list[int]:
    """Return the token ids of a prompt that asks for the text between two given texts.

    Raises:
        EESDError: The tokenizer has no special tokens for this.
    """
    for names in MARKS:
        marks = [
            token for name in names if (token := codec.tokenizer.token_to_id(name)) is not None
        ]
        if len(marks) == len(names):
            first, second, last = marks
            parts = [codec.ids(text, special=False) for text in (before, behind)]
            return [*codec.ids("", special=True), first, *parts[0], second, *parts[1], last]
    raise EESDError(
        "suffix is not supported, because this model's tokenizer has no tokens for "
        "filling in the middle; leave it out."
    )
