"""Equal scores in a SentencePiece vocabulary.

If several pairs of neighbours have the best score, llama.cpp merges the leftmost pair. The
tokenizers library supports only a fixed order of merges, so even merges with equal scores must have
an order. If the order can change tokens, the file is refused.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import AnyStr

from tokenizers.models import BPE

from eesd.common.checks import shown


def check_ties(scores: Mapping[str, float], model: BPE) -> None:
    """Check that equal scores lead to the same tokens as in llama.cpp.

    Llama 2 and Mistral give all runs of spaces the same score. For runs of one character with equal
    scores, the results of both programs are compared.

    Args:
        scores: Scores of the pieces that merges produce, without special tokens.
        model: Merges pieces in the order of their scores.

    Raises:
        ValueError: The tokens might differ from llama.cpp's.
    """

    @cache
    def is_made(piece: str) -> bool:
        if piece not in scores:
            return False
        return len(piece) == 1 or any(
            is_made(left) and is_made(right) for left, right in cuts(piece)
        )

    counts = Counter(score for piece, score in scores.items() if len(piece) > 1)
    tied = [piece for piece in scores if counts[scores[piece]] > 1 and len(piece) > 1]
    tied = [piece for piece in tied if is_made(piece)]
    runs = {}
    for first, second in _conflicts(tied, scores) if len(tied) > 1 else ():
        if {*first} != {*second} or len({*first}) > 1:
            raise ValueError(_sentence(first, second))
        runs[first[0]] = (first, second)
    for letter, pieces in runs.items():
        longest = max(len(piece) for piece in scores if {*piece} == {letter})
        for count in range(2, 4 * longest):
            found = [token.value for token in model.tokenize(letter * count)]
            if found != _leftmost_first(letter * count, scores):
                raise ValueError(_sentence(*pieces))


def cuts(piece: AnyStr) -> Iterator[tuple[AnyStr, AnyStr]]:
    """Return all ways to cut a piece in two."""
    return ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))


def _conflicts(tied: list[str], scores: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield pairs of pieces for which merging one of them first can prevent the other. The two
    pieces overlap, or one is contained in a piece with a better score."""
    begins = defaultdict(set)
    for piece in tied:
        for left, _ in cuts(piece):
            begins[left, scores[piece]].add(piece)
    for piece in tied:
        for _, right in cuts(piece):
            others = begins[right, scores[piece]] - {piece}
            yield from ((piece, other) for other in sorted(others))
    known = set(tied)
    for piece, score in scores.items():
        for part in {part for cut in cuts(piece) for part in cut} & known:
            if score > scores[part]:
                yield part, piece


def _leftmost_first(text: str, scores: Mapping[str, float]) -> list[str]:
    """Return the pieces of a text after merges as in llama.cpp."""
    pieces = list(text)
    while True:
        pairs = (left + right for left, right in pairwise(pieces))
        found = [(-scores[pair], at) for at, pair in enumerate(pairs) if pair in scores]
        if not found:
            return pieces
        _, at = min(found)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def _sentence(first: str, second: str) -> str:
    return (
        f"its pieces {shown(first)} and {shown(second)} have scores that do not say which of them "
        "comes first; convert the model again with its tokenizer.model beside it, or give its "
        "Hugging Face directory"
    )
