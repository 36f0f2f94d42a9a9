"""A Jinja sandbox with limits: a template takes bounded time and memory, whatever it does.

A template is a program that somebody else wrote. Jinja's sandbox keeps it away from files and from Python's insides, but
``{{ 'a' * 10**9 }}`` or two nested loops would still occupy the process. Here every step of a template costs work, and so does
everything that it makes: a number of characters, or :data:`SLOT` for each item of a container. Work is counted, not timed, so
the same template is refused everywhere. There is a deadline as well, for slow machines.

All operations that can make more than they are given (``*``, ``ljust``, ``replace``, ``join``, ``%``, ...) are checked before
they run. Methods that no chat template needs are refused.

Values are measured as they would be printed: an object that a list holds twice counts twice. Otherwise lists of lists of the
same list would be small here, and endless for Python's ``repr`` and ``==``.
"""

import functools
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from eesd.common.errors import EESDError

MAX_SOURCE = 1 << 17
"""Longest template, in characters. The longest published ones have some 20,000."""
MAX_SIZE = 1 << 24
"""Size of the largest value that a template may make, and of its output."""
MAX_WORK = 1 << 27
"""Work of one rendering. At most four bytes each, so at most half a gigabyte is made, most of it not at once."""
MAX_SECONDS = 10.0
STEP = 32
"""Work of one step: a call, an operator, a turn of a loop. 4 million of them are allowed."""
SLOT = 16
"""Size of an item in a container: its place and its own header, in units of four bytes."""
MAX_DEPTH = 100
"""Deepest nesting of containers. Python recurses over them, in places without a check of its own."""
_MAX_BITS = 1 << 14
"""Longest integer that ``*`` and ``**`` may make."""
_MAX_SLOW = 10_000
"""Largest argument of filters whose time is not linear in it."""

_METHODS = {
    str: "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper "
    "zfill",
    dict: "copy get items keys values",
    list: "copy count index",
    tuple: "count index",
    range: "count index",
    float: "is_integer",
}
METHODS = {(owner, name) for owner, names in _METHODS.items() for name in names.split()}
"""The methods of plain values that a template may call. Their time is linear in what they get and make."""
_EXISTING = {"attr", "d", "default", "first", "get", "items", "keys", "last", "max", "min", "random", "values"}
"""Filters and methods that give what is already there. Their results are not counted again."""
_HIDDEN = ("_loop_vars", "_block_vars")
"""What Jinja passes to every call."""
_LINES = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_NUMBER = re.compile(r"\d{5,}|\*")
"""A width in a format that is too large, or comes from an argument."""


def measure(value: Any, most: int = MAX_SIZE) -> tuple[int, int]:
    """Measure a value.

    Args:
        value: Any value of a template.
        most: The largest size that matters.

    Returns:
        Its size, and the depth of its nesting.

    Raises:
        EESDError: It is larger than ``most``, or nested too deeply.
    """
    if isinstance(value, str) and len(value) <= most:
        return len(value), 0
    total, depth, level = 0, 0, [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, (str, bytes)):
                total += len(item)
            elif isinstance(item, int):
                total += item.bit_length() >> 5
            elif isinstance(item, range):
                total += SLOT * len(item)
            elif isinstance(item, Mapping):
                total += SLOT * len(item)
                inner.extend(item.keys())
                inner.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset, types.MappingProxyType)) or type(item) in _VIEWS:
                total += SLOT * len(item)
                inner.extend(item)
            if total > most:
                raise _too_large(most)
        level = inner
        depth += bool(inner)
        if depth > MAX_DEPTH:
            raise EESDError("The chat template nests lists too deeply; use another template.")
    return total, depth


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def _too_large(most: int) -> EESDError:
    return EESDError(f"The chat template makes a text or list of more than {most:,} characters; use another template.")


class Work:
    """What one rendering has done so far."""

    def __init__(self) -> None:
        self._left = MAX_WORK
        self._deadline = time.monotonic() + MAX_SECONDS

    def add(self, amount: int) -> None:
        """Count one step and what it makes. Raises :class:`EESDError` when there is too much."""
        self._left -= STEP + amount
        if self._left < 0 or time.monotonic() > self._deadline:
            raise EESDError("The chat template takes too long for these messages; use another, or a shorter prompt.")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one rendering of one template. Make a new one for the next."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=pass_context(lambda _, value: self._shown(value)))
        self.work = Work()
        del self.globals["lipsum"]  # random text without a limit
        self.globals["namespace"] = TemplateNamespace
        self.limit_filters()
        for name, test in list(self.tests.items()):
            self.tests[name] = _limited_test(self, test)

    def limit_filters(self) -> None:
        """Put limits around all filters. Call it again after adding some."""
        for name, function in self.filters.items():
            if not hasattr(function, "limited"):
                self.filters[name] = _limited_filter(self, name, function)

    def parse_limited(self, source: str) -> nodes.Template:
        """Parse a template.

        Raises:
            EESDError: The template is too long.
            jinja2.TemplateSyntaxError: It is no template.
        """
        if len(source) > MAX_SOURCE:
            raise EESDError(f"The chat template has {len(source)} characters, more than {MAX_SOURCE}; use another template.")
        return self.parse(source)

    def compile_limited(self, tree: nodes.Template) -> types.CodeType:
        """Compile a template with the checks in it. The tree is changed."""
        _Checks().visit(tree)
        return self.compile(tree)

    def step(self, amount: int = 0) -> str:
        """Count a step, and text of the template itself that is shown in it."""
        self.work.add(amount)
        return ""

    def keep(self, value: Any) -> Any:
        """Count a new value, and return it."""
        self.work.add(measure(value)[0])
        return value

    def _shown(self, value: Any) -> Any:
        """Count a value that becomes text. Numbers and containers become longer, by escapes."""
        size = measure(value)[0]
        self.work.add(size if isinstance(value, str) else 12 * size)
        return value

    def fits(self, size: int) -> None:
        """Refuse what is going to be too large."""
        if size > MAX_SIZE:
            raise _too_large(MAX_SIZE)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Count the items of an iterator as they come."""
        for item in items:
            yield self.keep(item)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a macro or a method. Jinja calls this for every call in a template."""
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        __self.step()
        name = getattr(__obj, "__name__", "")
        if owner is not None and (isinstance(__obj, types.BuiltinMethodType) or isinstance(owner, str)):
            if not any(isinstance(owner, kind) for kind, method in METHODS if method == name):
                raise EESDError(f"The chat template calls {type(owner).__name__}.{name}, which is not allowed.")
            if isinstance(owner, str):
                args = __self._check_method(name, owner, args)
        elif not isinstance(__obj, Macro) or __obj.catch_varargs or __obj.catch_kwargs:
            measure(
                (args, [value for name, value in kwargs.items() if name not in _HIDDEN])
            )  # they may become a tuple that the template can use
        result = super().call(__context, __obj, *args, **kwargs)
        return result if owner is not None and name in _EXISTING else __self.keep(result)

    def _check_method(self, name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Check a method of a string before it runs. Returns its arguments, an iterator among them as a list."""
        if name in ("center", "ljust", "rjust", "zfill"):
            self.fits(max((item for item in args if isinstance(item, int)), default=0))
        elif name == "replace" and len(args) > 1:
            self.fits(_replaced(text, args[0], args[1]))
        elif name == "splitlines" or (name in ("split", "rsplit") and not (args and args[0])):
            self.fits(SLOT * len(text) // 2)
        elif name in ("split", "rsplit") and isinstance(args[0], str):
            self.fits(SLOT * text.count(args[0]))
        elif name == "join" and args and isinstance(args[0], Iterable):
            items = list(args[0])
            self.fits(measure(items)[0] + len(text) * len(items))
            return (items, *args[1:])
        return args

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an arithmetic operator. Jinja calls this for every one in a template."""
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            self.check_format(left, right)
        elif operator == "+":
            self.fits(
                sum(len(item) * (1 if isinstance(item, str) else SLOT) for item in (left, right) if hasattr(item, "__len__"))
            )
        return self.keep(super().call_binop(context, operator, left, right))

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        for count, item in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(item, (str, bytes, list, tuple)):
                self.fits(max(count, 0) * measure(item)[0])

    def check_format(self, text: str, values: Any) -> None:
        """Check ``text % values`` before it runs: each place may take the largest value, and widths are widths."""
        if _NUMBER.search(text):
            raise EESDError("The chat template formats a number too widely; use another template.")
        self.fits(text.count("%") * 10_000 + (text.count("%") if isinstance(values, Mapping) else 12) * measure(values)[0])

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.step()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method ``format`` of a string with limits, as Jinja does it for its own."""
        if super().wrap_str_format(value) is None:
            return None
        if isinstance(value.__self__, Markup):
            raise EESDError("The chat template formats escaped text, which is not allowed.")
        formatter: Formatter = _LimitedFormatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return formatter.vformat(value.__self__, args, kwargs)

        return formatted


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise EESDError("The chat template computes a number that is too large; use another template.")


def _replaced(text: str, old: Any, new: Any) -> int:
    """Largest size of a text in which a string is replaced."""
    return len(text) + text.count(str(old)) * len(str(new))


class _LimitedFormatter(SandboxedFormatter):
    """``str.format`` that counts each field before it shows it."""

    def __init__(self, environment: LimitedEnvironment) -> None:
        super().__init__(environment)
        self._environment = environment

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _NUMBER.search(format_spec):
            raise EESDError("The chat template formats a number too widely; use another template.")
        self._environment._shown(value)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._environment._shown(value)
        return super().convert_field(value, conversion)


class TemplateNamespace(Namespace):
    """What ``namespace()`` makes: values that loops may set. Their names must not begin with ``_``, as in transformers.

    It changes after it is measured, so it measures nothing, and prints without what it holds.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)  # `self` has no name here: it may be the name of a value
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise EESDError(f"The chat template sets {name!r} in a namespace, which is not allowed.")


def _limited_test(environment: LimitedEnvironment, function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        environment.step()
        return function(*args, **kwargs)

    return limited


def _limited_filter(environment: LimitedEnvironment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is checked before it runs, and whose result is counted. Iterators are counted as they go."""
    hidden = 1 if hasattr(function, "jinja_pass_arg") else 0
    """Jinja gives some filters the environment or the context first."""

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        environment.step()
        if len(args) > hidden:
            check = _FILTERS.get(name)
            if check is not None:
                args = (*args[:hidden], check(environment, *args[hidden:], **kwargs), *args[hidden + 1 :])
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            return environment.each(result)
        return result if name in _EXISTING else environment.keep(result)

    limited.limited = True  # type: ignore[attr-defined]
    return limited


def _size(value: Any) -> int:
    """What an argument for a width or a separator adds: itself if it is a number, or else its length."""
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _check_widths(environment: LimitedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Any:
    """For ``center``, ``batch`` and ``indent``: as many lines as there are, as many items as are asked for."""
    lines = len(_LINES.findall(value)) + 1 if isinstance(value, str) else SLOT
    environment.fits(lines * sum(map(_size, (*args, *kwargs.values()))))
    return value


def _check_slow(_: LimitedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Any:
    measure((value, *args, *kwargs.values()), _MAX_SLOW)
    return value


def _check_round(_: LimitedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Any:
    _check_bits(4 * sum(map(_size, (*args[:1], kwargs.get("precision")))))
    return value


def _check_list(environment: LimitedEnvironment, value: Any, *_: Any, **__: Any) -> Any:
    if isinstance(value, str):
        environment.fits(SLOT * len(value))
    return value


def _check_format(environment: LimitedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Any:
    environment.check_format(str(value), kwargs or args)
    return value


def _check_replace(environment: LimitedEnvironment, value: Any, old: Any, new: Any, count: Any = None) -> Any:  # noqa: ARG001
    measure((value, old, new))
    environment.fits(_replaced(str(value), old, new))
    return value


def _check_join(environment: LimitedEnvironment, value: Any, d: Any = "", attribute: Any = None) -> Any:
    items = list(environment.each(value))
    found = items if attribute is None else list(environment.each(map(make_attrgetter(environment, attribute), items)))
    size = measure(found)[0] * (1 if all(isinstance(item, str) for item in found) else 12)
    environment.fits(size + len(found) * len(str(d)))
    return items


def _check_sum(environment: LimitedEnvironment, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    """A sum of lists copies the list for each item."""
    items = list(environment.each(value))
    found = items if attribute is None else list(environment.each(map(make_attrgetter(environment, attribute), items)))
    total = sum(len(item) for item in (start, *found) if isinstance(item, (list, tuple)))
    environment.fits(len(found) * total // 64)
    return items


def _check_tojson(
    environment: LimitedEnvironment,
    value: Any,
    ensure_ascii: Any = False,  # noqa: ARG001
    indent: Any = None,
    separators: Any = None,
    **_: Any,
) -> Any:
    size, depth = measure(value)
    between = sum(map(_size, separators)) if isinstance(separators, (list, tuple)) else 0
    environment.fits(size + (size // SLOT) * ((depth + 1) * _size(indent) + between))
    return value


_FILTERS: dict[str, Callable[..., Any]] = {
    "batch": _check_widths,
    "center": _check_widths,
    "indent": _check_widths,
    "format": _check_format,
    "groupby": _check_list,
    "join": _check_join,
    "list": _check_list,
    "pprint": _check_slow,
    "replace": _check_replace,
    "round": _check_round,
    "sort": _check_list,
    "striptags": _check_slow,
    "sum": _check_sum,
    "title": _check_list,
    "tojson": _check_tojson,
    "urlencode": _check_list,
    "urlize": _check_slow,
    "wordcount": _check_list,
    "wordwrap": _check_slow,
    "xmlattr": _check_slow,
}
"""What checks a filter's value and arguments before it runs, and returns the value to use: a list for an iterator that it read.

The filters that are not here make no more than they get, in linear time.
"""


class _Checks(NodeTransformer):
    """Puts the checks into a template's syntax tree that the sandbox has no hook for."""

    def _call(self, name: str, *args: nodes.Expr) -> nodes.Expr:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)

    def _kept(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("keep", node).set_lineno(node.lineno)  # type: ignore[return-value]

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("step")).set_lineno(node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        """Text of the template costs work, too: a loop can repeat it."""
        self.generic_visit(node)
        length = sum(len(item.data) for item in node.nodes if isinstance(item, nodes.TemplateData))
        return [nodes.ExprStmt(self._call("step", nodes.Const(length))).set_lineno(node.lineno), node] if length else [node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [item if isinstance(item, nodes.Const) else self._call("_shown", item) for item in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        return self._kept(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        if isinstance(node.arg, nodes.Slice):
            return self._kept(node)
        self.generic_visit(node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return node if all(isinstance(item, nodes.Const) for item in node.items) else self._kept(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._kept(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        if node.ctx != "load":
            return node
        return node if all(isinstance(item, nodes.Const) for item in node.items) else self._kept(node)
