"""Jinja's sandbox with limits: a chat template can neither hang a process nor fill its memory.

Templates come with weights, which the user trusts, and no request brings one. So Jinja's own sandbox keeps them from files and
from Python's insides. What remains is a loop or a text without an end: each turn of a loop, each call and each new value costs
work. Operations that make much out of little (``*``, ``**``, ``replace``, ``join``, widths) are checked before they run.
Work is counted, not timed, so the same template is refused on every machine; a deadline stops what is merely slow.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import CodeType
from typing import Any, cast

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from eesd.common.errors import EESDError

MAX_SOURCE = 1 << 17
"""Longest template, in characters. The longest published ones have some 20,000."""
MAX_SIZE = 1 << 24
"""Size of the largest value, and of the output: its characters, and :data:`STEP` for each item of a container."""
MAX_WORK = 1 << 27
"""Work of one rendering: the sizes of all values that it makes, and :data:`STEP` for each step."""
STEP = 64
MAX_SECONDS = 10.0
MAX_DEPTH = 100
"""Deepest nesting of containers. Python recurses over them, in places without a check of its own."""
MAX_REPEAT = 10_000
"""Most characters or items that ``*`` makes, and the widest place of a format."""
MAX_BITS = 1 << 14
"""Longest integer that ``*`` and ``**`` make."""
WIDENING = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "to_bytes", "zfill"}
"""Methods and filters that make as much as a number says."""
EXISTING = {"attr", "d", "default", "first", "get", "items", "keys", "last", "max", "min", "random", "values"}
"""Methods and filters that give what is already there. Their results are not counted again."""
SLOW = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
"""Filters that take more than linear time."""
_TURNS, _KEEP = "turns of a loop", "keep a value"
"""Filters that no template can name."""
_TOO_LARGE = f"makes a text or list of more than {MAX_SIZE:,} characters"
_WIDE_FORMAT = re.compile(r"%(\(\w*\))?[-+ #0]*\d*\.?(\d{5}|\*)|\{[^{}]*:[^{}]*(\d{5}|\{)")
"""A place of a format that is wider than 9,999, or as wide as an argument says."""


def size_of(value: Any, depth: int = 0) -> int:
    """Size of a value as it would be printed: what a list holds twice counts twice.

    Raises:
        EESDError: It is too large, or nested too deeply.
    """
    if isinstance(value, (str, bytes)):
        size = len(value)
    elif isinstance(value, range):
        size = STEP * len(value)
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
        size = STEP * len(value)
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            size += size_of(item, depth + 1)
            _check(size <= MAX_SIZE, _TOO_LARGE)
    else:
        size = 0
    _check(size <= MAX_SIZE, _TOO_LARGE)
    _check(depth <= MAX_DEPTH, "nests lists too deeply")
    return size


def _check(fine: bool, fault: str) -> None:
    if not fine:
        raise EESDError(f"The chat template {fault}; use another template.")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one rendering of one template. Make a new one for the next."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False)
        self._left, self._deadline = MAX_WORK, time.monotonic() + MAX_SECONDS
        del self.globals["lipsum"]  # random text without a limit
        self.filters |= {_TURNS: self._turns, _KEEP: self.keep}

    def limit_filters(self) -> None:
        """Put limits around all filters. Call it when all are there."""
        self.filters.update({name: self._limited(name, function) for name, function in self.filters.items()})

    def parse_limited(self, source: str) -> nodes.Template:
        """Parse a template.

        Raises:
            EESDError: The template is too long.
            jinja2.TemplateSyntaxError: It is no template.
        """
        _check(len(source) <= MAX_SOURCE, f"has {len(source)} characters, more than {MAX_SOURCE}")
        return self.parse(source)

    def compile_limited(self, tree: nodes.Template) -> CodeType:
        """Compile a template that counts its work. The tree is changed."""
        return self.compile(_Counted().visit(tree))

    def keep(self, value: Any) -> Any:
        """Count a step and a new value, and return it; an iterator is counted as it goes."""
        if isinstance(value, Iterator):
            return self._turns(value)
        self._count(size_of(value))
        return value

    def _count(self, size: int = 0) -> None:
        self._left -= STEP + size
        if self._left < 0 or time.monotonic() > self._deadline:
            raise EESDError("The chat template takes too long for these messages; use another, or a shorter prompt.")

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count()
            yield item

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the text of a template, a macro or a block. Jinja calls this, too."""
        parts, size = [], 0
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            _check(size <= MAX_SIZE, _TOO_LARGE)
        return str(self.keep("".join(parts)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a macro or a method. Jinja calls this for every call in a template."""
        name, owner = getattr(__obj, "__name__", ""), getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, (str, int)):
            if name == "join" and args:
                args = (list(__self._turns(args[0])),)
            _check_call(name, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return result if owner is not None and name in EXISTING else __self.keep(result)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        hidden = (
            1 if hasattr(function, "jinja_pass_arg") else 0
        )  # Jinja gives some filters the environment or the context first

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            if len(args) > hidden:
                value = list(self._turns(args[hidden])) if name == "join" else args[hidden]
                args = (*args[:hidden], value, *args[hidden + 1 :])
                _check_call(name, value, args[hidden + 1 :], kwargs)
            result = function(*args, **kwargs)
            return result if name in EXISTING else self.keep(result)

        return limited

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator that can make more than it is given."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * abs(right) <= MAX_BITS, "computes a number that is too large")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() + right.bit_length() <= MAX_BITS, "computes a number that is too large")
        elif operator == "*":
            for count, item in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(item, (str, bytes, list, tuple)):
                    _check(
                        count * len(item) <= MAX_REPEAT, f"repeats a text or list to more than {MAX_REPEAT} characters or items"
                    )
        elif operator == "%" and isinstance(left, str):
            _check_call("format", left, (), {})
        return self.keep(super().call_binop(context, operator, left, right))


def _check_call(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check a method or a filter before it runs on ``value``."""
    if name in WIDENING:
        widest = max((abs(number) for number in (*args, *kwargs.values()) if isinstance(number, int)), default=0)
        _check(widest <= MAX_REPEAT, f"widens a text or list to more than {MAX_REPEAT}")
    elif name in ("format", "format_map"):
        _check(not _WIDE_FORMAT.search(str(value).replace("{{", "")), "formats a value too widely")
    elif name == "replace" and len(args) > 1:
        _check(str(value).count(str(args[0])) * len(str(args[1])) <= MAX_SIZE, _TOO_LARGE)
    elif name in SLOW:
        _check(size_of([value, *args, *kwargs.values()]) <= MAX_REPEAT, f"uses {name} with more than {MAX_REPEAT} characters")
    elif name == "join":
        items, between = (args[0], value) if isinstance(value, str) and args else (value, args[0] if args else "")
        _check(size_of(items) + len(items) * len(str(between)) <= MAX_SIZE, _TOO_LARGE)


class _Counted(NodeTransformer):
    """Counts what the sandbox has no hook for: the turns of loops, and the values of other operators."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), _TURNS)
        return node

    def visit_Concat(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _KEEP)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _KEEP) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _KEEP) if node.ctx == "load" else node

    visit_List = visit_Dict = visit_Concat


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)  # type: ignore[return-value]
