"""Markdown that commands print and write."""

from collections.abc import Iterable, Sequence


def table_text(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table as text, without a line break at its end."""
    return "\n".join(table(columns, rows)[:-1])


def table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a table, followed by an empty line."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:], ""]
