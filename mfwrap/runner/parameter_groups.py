"""The parameter groups of a recipe's optimizer."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from mfwrap.runner.document import Path, RecipeDocument
from mfwrap.tensors.wrappers import plain_name

DEFAULT_GROUP = "default"
"""Name of the group of all parameters that no pattern matches."""


class RateGroup(NamedTuple):
    """Parameters with a schedule of their own."""

    path: Path
    """Path of the patterns in the recipe."""

    patterns: tuple[str, ...]
    """Parts of the parameters' names, or shell patterns such as ``*.embed_tokens.*``."""

    learning_rate: float | None
    """Learning rate; ``None`` for that of the training."""

    @property
    def name(self) -> str:
        """Name of the group in logs and records."""
        return ",".join(self.patterns)


def first_match(name: str, groups: Iterable[Sequence[str]]) -> int | None:
    """Return the number of the first group with a pattern that matches a parameter's name.

    Args:
        name: Name of the parameter.
        groups: Patterns of each group: parts of names, or shell patterns of whole names.
    """
    for number, patterns in enumerate(groups):
        if any(pattern in name or fnmatchcase(name, pattern) for pattern in patterns):
            return number
    return None


def parameter_groups(
    document: RecipeDocument,
    network: nn.Module,
    rate_groups: Sequence[RateGroup],
    decayed: Collection[str],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: by schedule, then with and without weight decay.

    A parameter belongs to the first of `rate_groups` that matches its name, or else to a group
    named ``default``.

    Source: MindFormers, ``get_optimizer_grouped_parameters``.

    Args:
        document: Recipe; supplies places for errors.
        network: Network with or without wrappers.
        rate_groups: Groups with schedules of their own. Without any, the groups have no names.
        decayed: Names of the parameters with weight decay.
        weight_decay: Weight decay of these parameters; all others have none.

    Raises:
        RecipeError: If one of `rate_groups` has no parameter.
    """
    members: dict[tuple[int, bool], list[nn.Parameter]] = {}
    last = len(rate_groups)
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            number = first_match(plain_name(name), (group.patterns for group in rate_groups))
            number = last if number is None else number
            members.setdefault((number, name in decayed), []).append(parameter)
    numbers = {number for number, _ in members}
    for number, group in enumerate(rate_groups):
        if number not in numbers:
            says = (
                "expected patterns of trainable parameters that no earlier group has, got "
                f"{list(group.patterns)}, which match none"
            )
            raise document.error(group.path, says)
    groups = []
    # The default group comes first: its rate is the one that the step and the logs report.
    for number in [last, *range(last)]:
        for has_decay in (True, False):
            if (number, has_decay) not in members:
                continue
            settings: dict[str, Any] = {
                "params": members[number, has_decay],
                "weight_decay": weight_decay if has_decay else 0.0,
            }
            if rate_groups:
                settings["name"] = DEFAULT_GROUP if number == last else rate_groups[number].name
            if number < last and rate_groups[number].learning_rate is not None:
                settings["lr"] = rate_groups[number].learning_rate
            groups.append(settings)
    return groups
