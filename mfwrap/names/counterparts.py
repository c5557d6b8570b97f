"""Look up what to write for a name of MindSpore or MindFormers, or for an attribute."""

from typing import Literal, NamedTuple

from mfwrap.names import attributes, libraries, training
from mfwrap.names.texts import SAME, Without

Verdict = Literal["same", "write", "leave out", "no counterpart"]


class Counterpart(NamedTuple):
    """What stands for a name."""

    verdict: Verdict
    """Whether mfwrap has the name, something else is written for it, it is not needed, or nothing
    replaces it."""

    text: str
    """What to write, or why nothing replaces the name."""

    def advice(self, before_write: str, before_reason: str) -> str:
        """Return the end of a sentence about an absent name.

        Args:
            before_write: What separates the advice from the sentence.
            before_reason: The same before the reason why nothing replaces the name.
        """
        if self.verdict == "no counterpart":
            return f"{before_reason}nothing replaces it: {self.text}"
        return f"{before_write}write {self.text}"


AREAS: dict[str, tuple[str, ...]] = {
    "mindspore": ("mindspore", "callbacks"),
    "nn": ("nn", "mindspore"),
    "ops": ("ops",),
    "dataset": ("dataset", "transforms"),
    "transforms": ("transforms", "dataset"),
    "initializer": ("initializer",),
    "communication": ("communication",),
    "log": ("log",),
    "mindformers": ("mindformers", "callbacks"),
}
"""Areas in which a name of a package is looked up, in this order."""

_OF_IMPORTS = ("mindspore", "mindformers", "nn", "callbacks", "ops")
"""Areas of the names that people import from `mfwrap`."""


def find(area: str, name: str) -> Counterpart | None:
    """Return what stands for a name or an attribute; None if the table does not have it.

    Args:
        area: Area of the name, or kind of the object that has the attribute.
        name: The name.

    Example:
        >>> find("nn", "Dense")
        Counterpart(verdict='write', text='`torch.nn.Linear`')
        >>> find("cb_params", "cur_step_num").verdict, find("ops", "no_such_name")
        ('same', None)
    """
    for rows in (training.ROWS, libraries.ROWS, attributes.ROWS):
        text = rows.get(area, {}).get(name)
        if text is not None:
            return Counterpart(_verdict(text), str(text))
    return None


def _verdict(text: str) -> Verdict:
    if isinstance(text, Without):
        return "no counterpart"
    if text == SAME:
        return "same"
    return "leave out" if text.startswith("nothing") else "write"


def absent_name(name: str, *, of_callbacks: bool = False) -> Counterpart | None:
    """Return what to write for a name that somebody imports from `mfwrap`.

    Args:
        name: The name.
        of_callbacks: Whether it was imported from `mfwrap.callbacks`.
    """
    areas = ("callbacks",) if of_callbacks else _OF_IMPORTS
    return next((found for area in areas if (found := find(area, name))), None)
