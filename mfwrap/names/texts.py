"""The texts of the table of names: what to write, or why there is nothing to write."""

from typing import final


@final
class Without(str):
    """Why nothing replaces a name: a clause, such as "torch has no such optimizer"."""

    __slots__ = ()


SAME = "the same"
"""The text of a name that mfwrap has, too, with the same meaning."""


def each(names: str, text: str) -> dict[str, str]:
    """Return rows with the same text for several names.

    Args:
        names: Names, separated by blanks. ``name=other`` is a name that torch calls `other`.
        text: Text of each name; ``{}`` is replaced by torch's name.

    Example:
        >>> each("Tanh Hswish=Hardswish", "`torch.nn.{}`")
        {'Tanh': '`torch.nn.Tanh`', 'Hswish': '`torch.nn.Hardswish`'}
        >>> type(each("Lamb", Without("torch has none"))["Lamb"]).__name__
        'Without'
    """
    rows = {}
    for word in names.split():
        name, _, other = word.partition("=")
        rows[name] = text if isinstance(text, Without) else text.format(other or name)
    return rows
