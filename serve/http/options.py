"""The options of a server, and the state that all its routes share."""

import re
from dataclasses import dataclass, field
from ipaddress import ip_address

from eesd.common.checks import check_integer, check_number, shown
from eesd.common.errors import EESDError
from eesd.runtime.batch.service import Service
from eesd.runtime.text import TextCodec
from eesd.serve.http.metrics import Metrics

_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://[a-z0-9_.-]+(:[0-9]+)?|[a-z]+://\[[0-9a-f:]+\](:[0-9]+)?"
)


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Limits and names of a server.

    Attributes:
        model_name: The name that clients give as ``model``, or "" to use the name in the engine
            directory.
        aliases: Additional names that clients may give.
        api_keys: Requests must have one of these keys as a bearer token. If empty, no key is
            needed.
        allowed_hosts: Host names (without ports and regardless of case) that the ``Host`` of a
            request may have. If empty, all names are accepted. The check refuses requests from
            another site's page if the site's name resolves to this server (DNS rebinding). Requests
            without ``Host``, as in HTTP/1.0, and probes are always accepted.
        allowed_origins: Origins of the pages that may send requests from a browser (CORS). ``*``
            stands for all origins.
        metrics_open: Whether ``/metrics`` is open without a key.
        max_body_bytes: Maximum size of a body.
        max_prompt_tokens: Maximum length of a prompt in tokens, or 0 for the limit of the engines'
            KV cache.
        max_n: Maximum number of texts per request, which is the number of prompts times ``n``.
        request_timeout: Seconds after which a request ends with the tokens that it has by then.
        body_timeout: Seconds within which a body, or the head of a request, must arrive.
        send_timeout: Seconds for which a client may leave an answer unread.
            :func:`~eesd.serve.http.run.serve` applies it.
        drain_seconds: Time that running requests have to finish when the server stops.

    Raises:
        EESDError: A value has another type, or is out of range.
    """

    model_name: str = ""
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    metrics_open: bool = False
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int = 0
    max_n: int = 64
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    send_timeout: float = 60.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in (self.model_name, *self.aliases):
            if not isinstance(name, str) or not name.isprintable():
                raise EESDError(f"model_name is {shown(name)}; give a printable name.")
        for key in self.api_keys:
            if (
                not key.isascii()
                or not key.isprintable()
                or not key.strip() == key
                or not 8 <= len(key) <= 1024
            ):
                raise EESDError(
                    "An API key is invalid; give 8 to 1024 printable ASCII characters without "
                    "surrounding blanks."
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host) and not _is_address(host):
                raise EESDError(
                    f"The allowed host {shown(host)} is not a host name; give one such as "
                    "api.example.com."
                )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise EESDError(
                    f"The allowed origin {shown(origin)} is invalid; give one such as "
                    "https://chat.example.com, or *."
                )
        check_integer("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        check_integer("max_prompt_tokens", self.max_prompt_tokens, 0, 2**63 - 1)
        check_integer("max_n", self.max_n, 1, 1 << 20)
        for name in ("request_timeout", "body_timeout", "send_timeout"):
            check_number(
                name, getattr(self, name), lambda x: 0 < x < 1e6, "a number of seconds above 0"
            )
        check_number(
            "drain_seconds",
            self.drain_seconds,
            lambda x: 0 <= x < 1e6,
            "a number of seconds of at least 0",
        )


@dataclass(kw_only=True)
class Serving:
    """State that the routes of one server share.

    Attributes:
        service: The batch.
        options: The limits.
        model_name: The name in the ``model`` field of answers.
        codec: The tokenizer and the chat template, or None if the model has no tokenizer.
        metrics: Metrics for Prometheus.
        active: Number of requests that are being answered, not counting probes.
        draining: Whether the server is stopping. If so, running requests finish, and new requests
            are refused.
    """

    service: Service
    options: ServeOptions
    model_name: str = field(init=False)
    codec: TextCodec | None = field(init=False)
    metrics: Metrics = field(init=False)
    active: int = 0
    draining: bool = False

    def __post_init__(self) -> None:
        llm = self.service.llm
        self.model_name = self.options.model_name or llm.manifest.model
        self.codec = llm.codec if llm.has_tokenizer else None
        self.metrics = Metrics(self.service, self.model_name)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that clients may give."""
        return tuple(dict.fromkeys((self.model_name, *self.options.aliases)))

    @property
    def max_model_len(self) -> int:
        """Maximum length of a text in tokens. The prompt is included."""
        return self.service.llm.manifest.max_seq_len

    @property
    def ready(self) -> bool:
        return self.service.alive and not self.draining
