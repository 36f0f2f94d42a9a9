"""llama.cpp's rules for cutting a text before tokens are merged. A GGUF file names its rule in
``tokenizer.ggml.pre``.

A file holds only the name. llama.cpp (``src/llama-vocab.cpp``) defines its meaning, so the rules
are part of the format. Expressions have Oniguruma's syntax. ``lab/gguf_tokenizers`` compares the
token ids with llama.cpp's token ids.
"""

_CASES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff&&\\S]+"
_MARKED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, _MARKED + r"[\r\n]*|" + _SPACES)
_NO_MARKS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LATIN = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


def _by_case(upper: str, lower: str, after: str, rest: str) -> str:
    """Return an expression for words that end where lower case changes to upper case. llama.cpp
    distinguishes the case of A to Z only."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{after}|{first}{upper}+{lower}*{after}|{rest}"


_NOT_LOWER = r"[\p{L}&&[^a-z]]"
_NOT_UPPER = r"[\p{L}&&[^A-Z]]"
_AFTER_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_LLAMA3_NAMES = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
)
_RULES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    _LLAMA3_NAMES: (_LLAMA3,),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"): (_LLAMA3,),
    (
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "f2llmv2",
        "megrez",
        "stablelm2",
        "hunyuan",
        "solar-open",
        "grok-2",
    ): (_QWEN2,),
    ("qwen35",): (
        _CASES
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        + _SPACES,
    ),
    ("exaone-moe",): (
        _CASES
        + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("minicpm5",): (r"\p{N}{1,3}", _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+|" + _REST),
    ("ufakzeka",): (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST,),
    (
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "gigachat",
        "jina-v2-es",
        "jina-v2-de",
        "a.x-4.0",
        "mellum",
        "modern-bert",
    ): (_GPT2,),
    (
        "jina-v1-en",
        "jina-v2-code",
        "roberta-bpe",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
    ): (_GPT2,),
    (
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ): (r"\p{N}", _GPT2),
    ("deepseek-llm",): (
        r"[\r\n]",
        rf"\s?[{_LATIN}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
        r"(?<!\s)\s+\z",
        _ASIAN,
        r"\p{N}+",
    ),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("spark2_5",): (r"\p{N}{1,3}", _CJK, _MARKED + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ("viking",): (_NO_MARKS, r"\p{N}"),
    ("tekken",): (_by_case(_NOT_LOWER, _NOT_UPPER, "", r"\p{N}|" + _AFTER_SLASHES),),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): (
        _by_case(_NOT_LOWER, _NOT_UPPER, _CASES + "?", r"\p{N}{1,3}|" + _AFTER_SLASHES),
    ),
    ("superbpe",): (r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))"),
    ("seed-coder",): (
        _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,
    ),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names}
"""Rules by ``tokenizer.ggml.pre``. A rule is a sequence of expressions. Each expression cuts the
pieces that the previous expression made.

llama.cpp's other rules are for architectures that are not supported."""
WHOLE_PIECES = {*_LLAMA3_NAMES, "minicpm5", "glm4", "glm5", "tekken"}
"""If a piece is a token, these rules keep it whole, without merges."""
WITH_ESCAPED_SPACES = "[^\\n]+|[\\n]+"
"""The rule of Gemma 4, whose files name it in ``tokenizer.ggml.model``."""
BEGINS = {*_LLAMA3_NAMES, "tekken"}
"""Rules that begin a text with the BOS token, unless the file overrides it."""
