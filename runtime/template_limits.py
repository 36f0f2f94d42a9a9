"""Jinja's sandbox with limits, so that a chat template can neither hang a process nor fill its
memory.

Templates come with weights, which the user trusts, and never with a request. So Jinja's sandbox is
enough to keep them away from files and Python's internals. The remaining dangers are endless loops
and endless output. So a template's work is limited. The steps and the sizes of new values are
counted. An operation that multiplies sizes is refused before it runs if its result could exceed the
remaining work. Because work is counted and not timed, each machine refuses the same templates. A
deadline stops templates that are merely slow.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from eesd.common.errors import EESDError

MAX_WORK = 1 << 26
STEP = 64
"""One step counts as this amount of work, and so does one item of a new container. Each character
of a new text counts as 1."""
MAX_SECONDS = 10.0
"""The time limit of a template. It is in processor seconds, so that no template is refused because
the machine stalls."""
MAX_DEPTH = 100
"""Maximum nesting of containers. Python recurses over them, sometimes without a check."""
LACKING = {
    "encode",
    "format_map",
    "pprint",
    "striptags",
    "sum",
    "to_bytes",
    "translate",
    "urlize",
    "wordwrap",
    "xmlattr",
}
"""Filters and methods that templates may not use, because their time or their result can grow with
the square of their input."""
MULTIPLYING = {
    "batch",
    "center",
    "expandtabs",
    "format",
    "indent",
    "join",
    "ljust",
    "replace",
    "rjust",
    "round",
    "slice",
}
MULTIPLYING |= {"tojson", "zfill", "*", "**"}
"""Filters, methods and operators that multiply sizes. The size of the result is at most the size of
the value times the numbers and sizes of the arguments."""
WIDEST = 9999
_TOO_WIDE = re.compile(r"%(\(\w*\))?[-+ #0]*\d*\.?(\d{5}|\*)|\{[^{}]*:[^{}]*(\d{5}|\{)|\{\w*[.\[]")
"""Matches a field of a format string that is wider than :data:`WIDEST`, takes its width from an
argument, or shows a part of an argument."""
_TURNS = "turns of a loop"
_KEEP = "keep a value"
"""Names of internal filters. No template can write these names."""


def _check(fine: bool, fault: str) -> None:
    if not fine:
        raise EESDError(f"The chat template {fault}; use another template.")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one rendering of a template. Make a new sandbox for each rendering.

    Args:
        filters: Additional filters by name.
        options: Options of Jinja's environment.
    """

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options, optimized=False)
        self._left = MAX_WORK
        self._deadline = time.thread_time() + MAX_SECONDS
        del self.globals["lipsum"]  # it makes random text without a limit
        known = {
            name: function
            for name, function in {**self.filters, **filters}.items()
            if name not in LACKING
        }
        self.filters = {name: self._limited(name, function) for name, function in known.items()}
        self.filters |= {_TURNS: self._turns, _KEEP: self._keep}
        self.tests = {
            name: self._limited(name, test) for name, test in dict[str, Any](self.tests).items()
        }

    def parse(self, source: str, *names: Any) -> nodes.Template:
        """Parse a template, and insert code that counts its work. Raises ``TemplateSyntaxError`` if
        it is not valid."""
        tree: nodes.Template = _Counted().visit(super().parse(source, *names))
        return tree

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the text of a template, a macro or a block. Jinja calls this, too."""
        return "".join(map(self._keep, pieces))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute. Attributes of classes are not allowed.
        Jinja calls this for each attribute."""
        return (
            attr not in LACKING
            and not isinstance(obj, type)
            and super().is_safe_attribute(obj, attr, value)
        )

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a macro or a method. Jinja calls this for every call in a template."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _, *args = __self._before(__obj.__name__, owner, *args, **kwargs)  # type: ignore[assignment]
        return __self._keep(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result can be larger than its operands."""
        if operator == "%" and isinstance(left, str):
            self._before("format", left, right)
        elif operator == "*" and isinstance(left, int):
            self._before(operator, right, left)
        elif operator in ("*", "**"):
            self._before(operator, left, right)
        return self._keep(super().call_binop(context, operator, left, right))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or a test with limits."""
        # Jinja passes the environment or the context to some filters as the first argument.
        hidden = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            checked = self._before(name, *args[hidden:], **kwargs)
            return self._keep(function(*args[:hidden], *checked, **kwargs))

        return limited

    def _before(self, name: str, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """Refuse a call whose result could exceed the remaining work. Returns the arguments, in
        which iterators are replaced by lists."""
        if name not in MULTIPLYING:
            return args
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        value = args[0]
        given = [*args[1:], *kwargs.values()]
        if name == "format":
            _check(not _TOO_WIDE.search(str(value).replace("{{", "")), "formats a value too widely")
            work = (str(value).count("%") + str(value).count("{")) * (WIDEST + self._size(given))
        elif name == "replace":
            old, new = map(str, given[:2])
            # Either keyword argument may come first, so use the larger result of the two orders.
            work = max(str(value).count(old) * len(new), str(value).count(new) * len(old))
        else:
            _check(
                name != "join" or (len(args) < 3 and "attribute" not in kwargs),
                "joins an attribute of its items",
            )
            counts = name == "**" or not isinstance(value, int)
            factor = 1 + sum(
                abs(one) if counts and isinstance(one, int) else self._size(one) for one in given
            )
            work = (self._size(value) + (STEP if name == "*" else 1)) * factor
        self._need(work)
        return args

    def _size(self, value: Any, depth: int = 0) -> int:
        """Return the size of a value when it is printed. An item that is in a list twice counts
        twice. The size of a number is its number of bits."""
        _check(depth <= MAX_DEPTH, "nests lists too deeply")
        if isinstance(value, int):
            return value.bit_length()
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, Collection):
            return 0
        size = STEP * len(value)
        items: Collection[Any] = value
        if isinstance(value, range):
            items = ()
        elif isinstance(value, Mapping):
            items = [*value, *value.values()]
        for item in items:
            size += self._size(item, depth + 1)
            self._need(size)
        return size

    def _need(self, work: int) -> None:
        """Raise :class:`EESDError` if ``work`` exceeds the remaining work, or if the deadline has
        passed."""
        if work > self._left or time.thread_time() > self._deadline:
            raise EESDError(
                "The chat template takes too long for these messages; use another template, "
                "or a shorter prompt."
            )

    def _keep(self, value: Any) -> Any:
        """Count a step and a new value, and return the value. An iterator is counted while it
        runs."""
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
    """Inserts counting where the sandbox has no hook. These places are loop iterations, and values
    that brackets, ``~`` and macros make."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = nodes.Filter(node.iter, _TURNS, [], [], None, None).set_lineno(node.lineno)
        makes = (
            isinstance(node, (nodes.Concat, nodes.Dict, nodes.List, nodes.Tuple))
            or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice))
            or (isinstance(node, nodes.Name) and node.name in ("varargs", "kwargs"))
        )
        if not makes or getattr(node, "ctx", "load") != "load":
            return node
        return nodes.Filter(node, _KEEP, [], [], None, None).set_lineno(node.lineno)
