"""Texts of others are printed without being obeyed."""

import pytest

from mfwrap.runner.terminal import echo, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss 0.5 äöü 中文\nnext █", "loss 0.5 äöü 中文\nnext █"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\tc\x9b2J", "a\\rb\\tc\\x9b2J"),
        ("run\udcff", "run\\udcff"),
        ("a\u202eb", "a\\u202eb"),
    ],
)
def test_what_a_terminal_obeys_is_spelled_out(text, shown):
    """Escapes, carriage returns, marks of direction and bytes that are no text are spelled out."""
    assert printable(text) == shown


def test_a_text_is_printed(capsys):
    """The options are those of click; the end of the line is its own."""
    echo("a\x07", err=True)
    echo("b", nl=False)

    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("b", "a\\x07\n")
