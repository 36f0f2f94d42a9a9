"""Jinja's sandbox with limits: a chat template can neither hang a process nor fill its memory.

Templates come with weights, which the user trusts, and no request brings one. So Jinja's own sandbox keeps them from files and
from Python's insides. What remains is a loop or a text without an end. Steps and the sizes of new values are counted; an
operation that can make much out of little is refused before it runs if that would be more than what is left.
Work is counted, not timed, so the same template is refused on every machine; a deadline stops what is merely slow.
"""

import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from eesd.common.errors import EESDError

MAX_SOURCE = 1 << 17
"""Longest template, in characters. The longest published ones have some 20,000."""
MAX_WORK, STEP = 1 << 26, 64
"""Work of one rendering: ``STEP`` for each step and each item of a new container, and the characters of new texts."""
MAX_SECONDS = 10.0
MAX_DEPTH = 100
"""Deepest nesting of containers. Python recurses over them, in places without a check of its own."""
MAX_NUMBER = 10_000
"""Largest number for a method or filter of :data:`WIDENING`, bits that ``*`` and ``**`` make, and width of a format."""
WIDENING = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill"}
"""Methods and filters that make as much as a number says, at most for each character that they are given."""
QUADRATIC = {"pprint", "striptags", "translate", "urlize", "wordwrap", "xmlattr"}
"""Methods and filters whose time or result can grow with the square of what they are given."""
ITERATING = {"join", "map", "reject", "rejectattr", "select", "selectattr", "sum"}
"""Filters that do something with each item of what they are given."""
_TOO_WIDE = re.compile(r"%(\(\w*\))?[-+ #0]*\d*\.?(\d{5}|\*)|\{[^{}]*:[^{}]*(\d{5}|\{)|\{\w*[.\[]")
"""A place of a format that is wider than 9,999, or as wide as an argument says, or shows a part of an argument."""
_TURNS, _KEEP = "turns of a loop", "keep a value"
"""Filters that no template can name."""


def _check(fine: bool, fault: str) -> None:
    if not fine:
        raise EESDError(f"The chat template {fault}; use another template.")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one rendering of one template. Make a new one for the next.

    Args:
        filters: Filters by name, besides Jinja's own.
        options: Options of Jinja's environment.
    """

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options, optimized=False)
        self._left, self._deadline = MAX_WORK, time.monotonic() + MAX_SECONDS
        del self.globals["lipsum"]  # random text without a limit
        limited = {name: self._limited(name, function) for name, function in {**self.filters, **filters}.items()}
        self.filters = {**limited, _TURNS: self._turns, _KEEP: self._keep}

    def parse(self, source: str, *names: Any) -> nodes.Template:
        """Parse a template into one that counts its work. Raises ``TemplateSyntaxError`` if it is none."""
        _check(len(source) <= MAX_SOURCE, f"has {len(source)} characters, more than {MAX_SOURCE}")
        tree: nodes.Template = _Counted().visit(super().parse(source, *names))
        return tree

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the text of a template, a macro or a block. Jinja calls this, too."""
        return "".join(map(self._keep, pieces))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a macro or a method. Jinja calls this for every call in a template."""
        name, owner = getattr(__obj, "__name__", ""), getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, (str, int)):
            if name == "join" and args:
                args = (list(__self._turns(args[0])),)
                __self._before(name, args[0], [owner])
            else:
                __self._before(name, owner, [*args, *kwargs.values()])
        return __self._keep(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator that can make more than it is given."""
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            _check(bits <= MAX_NUMBER, "computes a number that is too large")
        elif operator == "*":
            count, item = (left, right) if isinstance(left, int) else (right, left)
            self._need(count * (STEP + self._size(item)) if isinstance(count, int) else 0)
        elif operator == "%" and isinstance(left, str):
            self._before("format", left, [right])
        return self._keep(super().call_binop(context, operator, left, right))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with limits."""
        hidden = int(hasattr(function, "jinja_pass_arg"))  # Jinja gives some filters the environment or the context first

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            first, value, others = args[:hidden], args[hidden], args[hidden + 1 :]
            if name in ITERATING and isinstance(value, Iterable):
                value = self._turns(value)
            if name == "join":
                value = list(map(make_attrgetter(self, kwargs.pop("attribute", None)), value))
            self._before(name, value, [*others, *kwargs.values()])
            return self._keep(function(*first, value, *others, **kwargs))

        return limited

    def _before(self, name: str, value: Any, given: Sequence[Any]) -> None:
        """Check a method or a filter before it runs on ``value`` with what else it is given."""
        if name in WIDENING:
            widest = max((abs(number) for number in given if isinstance(number, int)), default=1)
            _check(widest <= MAX_NUMBER, f"gives {name} a number above {MAX_NUMBER}")
            self._need(widest * self._size([value, *given]))
        elif name in QUADRATIC:
            self._need(self._size([value, *given]) ** 2)
        elif name in ("format", "format_map"):
            _check(not _TOO_WIDE.search(str(value).replace("{{", "")), "formats a value too widely")
            self._need((str(value).count("%") + str(value).count("{")) * (MAX_NUMBER + self._size(given)))
        elif name == "replace":
            old, new = map(str, given[:2])
            self._need(max(str(value).count(old) * len(new), str(value).count(new) * len(old)))  # they may have names
        elif name == "join":
            _check(len(given) < 2, "joins an attribute that it does not name")
            self._need(self._size(value) + len(value) * sum(len(str(between)) for between in given))
        else:
            _check(name not in ("encode", "to_bytes"), "makes bytes")  # their methods are those of texts again
            _check(name != "sum" or not any(isinstance(start, (list, tuple)) for start in given), "adds up lists")

    def _size(self, value: Any, depth: int = 0) -> int:
        """Size of a value as it would be printed: what a list holds twice counts twice."""
        _check(depth <= MAX_DEPTH, "nests lists too deeply")
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, (Mapping, KeysView, ItemsView, ValuesView, list, tuple, set, range)):
            return 0
        size, items = STEP * len(value), () if isinstance(value, range) else value
        for item in [*value, *value.values()] if isinstance(value, Mapping) else items:
            size += self._size(item, depth + 1)
            self._need(size)
        return size

    def _need(self, work: int) -> None:
        """Refuse more work than is left, and what comes too late."""
        if work > self._left or time.monotonic() > self._deadline:
            raise EESDError("The chat template takes too long for these messages; use another, or a shorter prompt.")

    def _keep(self, value: Any) -> Any:
        """Count a step and a new value, and return it; an iterator is counted as it goes."""
        if isinstance(value, Iterator):
            return self._turns(value)
        self._need(work := STEP + self._size(value))
        self._left -= work
        return value

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._keep(None)
            yield item


class _Counted(NodeTransformer):
    """Counts what the sandbox has no hook for: the turns of loops, and the values of other operators."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _TURNS)
        return node

    def visit_Concat(self, node: nodes.Node) -> nodes.Node:
        counted: nodes.Node = _filtered(self.generic_visit(node), _KEEP)
        return counted

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self.visit_Concat(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        return _filtered(node, _KEEP) if node.name in ("varargs", "kwargs") and node.ctx == "load" else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_Concat(node) if node.ctx == "load" else self.generic_visit(node)

    visit_List = visit_Dict = visit_Concat


def _filtered(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)
