"""Print texts of others, such as rows of data and names of files, without obeying them."""

from typing import Any

import click


def printable(text: str) -> str:
    """Return a text in which characters that a terminal obeys, such as escapes, are spelled out.

    Line breaks are kept.
    """
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def echo(text: str, **options: Any) -> None:
    """Print a text for the user.

    Args:
        text: What `printable` makes printable.
        options: Options of ``click.echo``.
    """
    click.echo(printable(text), **options)
