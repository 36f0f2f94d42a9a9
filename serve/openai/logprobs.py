"""Log-probabilities in the two formats of OpenAI's API."""

import codecs
from collections.abc import Sequence

from eesd.runtime.request import TokenLogprob, TokenOutput
from eesd.runtime.text import TextCodec, TokenBytes
from eesd.serve.openai.schemas import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

LEAST = -9999.0
"""Represents the logarithm of zero, which JSON cannot write."""


class TokenWriter:
    """Writes the tokens of one choice, one after another, as text and as bytes.

    Args:
        codec: The tokenizer, or None to write tokens in the form ``token_id:5``.
        prompt: The tokens before the choice's tokens.
    """

    def __init__(self, codec: TextCodec | None, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        self._bytes = TokenBytes(codec) if codec else None
        self._before = prompt[-1] if prompt else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def _written(self, token: int) -> bytes:
        """Return the bytes of a token. For special and unknown tokens these are the bytes of a
        name."""
        name = self._codec.tokenizer.id_to_token(token) if self._codec else None
        if not self._bytes or name is None:
            return f"token_id:{token}".encode()
        return self._bytes.added(token, self._before) if self._bytes.name(token) else name.encode()

    def _name(self, token: int) -> str:
        """Return a token as text. If a token is a part of a character, its bytes are written, as in
        OpenAI's API, so that different tokens stay distinct."""
        written = self._written(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _advance(self, token: int) -> None:
        if self._bytes and self._bytes.name(token):
            self._offset += len(self._utf8.decode(self._bytes.added(token, self._before)))
            self._before = token

    def completion(self, found: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Return the next tokens in the form of ``/v1/completions``. The list of the most likely
        tokens always includes the token itself."""
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for item in found:
            text = self._name(item.token)
            result.tokens.append(text)
            result.text_offset.append(self._offset)
            if item.logprob is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                top: dict[str, float] = {}
                # The best token comes first, because only the best of several tokens with the same
                # text is kept.
                for token, logprob in (*item.top, (item.token, item.logprob)):
                    top.setdefault(self._name(token), _finite(logprob))
                result.token_logprobs.append(_finite(item.logprob))
                result.top_logprobs.append(top)
            self._advance(item.token)
        return result

    def chat(self, outputs: Sequence[TokenOutput]) -> ChatLogprobs:
        """Return the next tokens in the form of ``/v1/chat/completions``."""
        content = []
        for output in outputs:
            found = output.logprob
            if found is None or found.logprob is None:
                continue
            top = [self._top(token, logprob) for token, logprob in found.top]
            chosen = self._top(found.token, found.logprob)
            content.append(ChatLogprob(**chosen.model_dump(), top_logprobs=top))
            self._advance(found.token)
        return ChatLogprobs(content=content)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        written = self._written(token)
        return TopLogprob(
            token=written.decode(errors="replace"), logprob=_finite(logprob), bytes=list(written)
        )


def _finite(logprob: float) -> float:
    return max(float(logprob), LEAST)
