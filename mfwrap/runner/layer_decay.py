"""The section ``layer_decay`` of a recipe: learning rates that fall from layer to layer."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from torch import nn

from mfwrap.arguments import check_positive_number
from mfwrap.recipes.data.source import RecipeSection
from mfwrap.tensors.wrappers import plain_name, unwrapped_network

SCALE = "lr_scale"
"""Key of a parameter group: the factor of its learning rate."""

_LAST = re.compile(r"(?:^|\.)(?:final_|project_out\.)")
"""Parts of names of what comes after the layers, wherever a model creates it. OPT creates its
``final_layer_norm`` before them."""


@final
@dataclass(frozen=True, kw_only=True)
class LayerDecaySection(RecipeSection):
    """The section ``layer_decay``.

    Layers are counted from the input: 0 is everything before the first layer, ``n`` the last layer,
    and ``n + 1`` everything after it. At each step, the learning rate of layer ``i`` is that of the
    training times ``factor ** (n + 1 - i)``.

    Source: MindFormers up to 1.5, ``layer_scale`` and ``layer_decay``. Later releases ignore both.

    Raises:
        ValueError: If `factor` is out of range.
    """

    factor: float
    """Learning rate of a layer, divided by that of the next layer; > 0."""

    weight_decay: Literal["all_layers", "first_layers"] = "all_layers"
    """Which layers have weight decay. With ``first_layers``, as in MindFormers, only those that
    begin before the first parameter without weight decay, in the order of the model's parameters:
    for ViT, for example, only the embeddings."""

    def __post_init__(self) -> None:
        """Check the range."""
        check_positive_number("factor", self.factor, finite=True)

    def groups(
        self,
        network: nn.Module,
        decayed: Collection[str],
        *,
        weight_decay: float,
        learning_rate: float,
    ) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer: by layer, with and without weight decay.

        The last layer comes first: its rate is the one that the step and the logs report.

        Source: MindFormers up to 1.5, ``get_optimizer_grouped_parameters``.

        Args:
            network: Network with or without wrappers.
            decayed: Names of the parameters with weight decay.
            weight_decay: Weight decay of these parameters; all others have none.
            learning_rate: Learning rate of the training.

        Raises:
            ValueError: If the network has no list of layers, or several.
        """
        numbers = layer_numbers(network)
        last = max(numbers.values())
        members: dict[tuple[int, bool], dict[str, Any]] = {}
        current = weight_decay
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                continue
            number, has_decay = numbers[name], name in decayed
            if not has_decay and self.weight_decay == "first_layers":
                current = 0.0
            if (number, has_decay) not in members:
                scale = self.factor ** (last - number)
                members[number, has_decay] = {
                    "params": [],
                    "weight_decay": current if has_decay else 0.0,
                    "lr": learning_rate * scale,
                    SCALE: scale,
                    "name": f"layer_{number}",
                }
            members[number, has_decay]["params"].append(parameter)
        order = sorted(members, key=lambda key: (-key[0], not key[1]))
        return [members[key] for key in order]


def layer_numbers(network: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's layer; see `LayerDecaySection`.

    The layers are the elements of the outermost ``nn.ModuleList``. In Swin, each element is a stage
    with a list of blocks: there, the layers are the blocks, and the other parameters of a stage
    belong to its last block.

    Source: MindFormers, ``get_vit_layer`` and ``get_swin_layer``.

    Args:
        network: Network with or without wrappers. In the order of its parameters, those before
            the layers have the number 0, apart from those whose names say that they come last.

    Returns:
        Numbers by the names of `network`.

    Raises:
        ValueError: If the network has no list of layers, several, or nothing after the layers.
    """
    names = [name for name, _ in network.named_parameters()]
    stack = _stack(network, names)
    config: Any = getattr(unwrapped_network(network), "config", None)
    has_stages = "swin" in str(getattr(config, "model_type", ""))
    block = r"(?:(\w+\.\d+)\.)?" if has_stages else "()"
    pattern = re.compile(rf"{re.escape(stack)}\.(\d+)\.{block}")
    found = [pattern.match(plain_name(name)) for name in names]
    paths = [None if match is None else (int(match[1]), match[2] or None) for match in found]
    numbers: dict[tuple[int, str | None], int] = {}
    for stage in sorted({path[0] for path in paths if path is not None}):
        blocks = _blocks([path[1] for path in paths if path is not None and path[0] == stage])
        first = len(numbers) and max(numbers.values())
        for number, block in enumerate(blocks, start=first + 1):
            numbers[stage, block] = number
        numbers[stage, None] = first + max(1, len(blocks))
    result: dict[str, int] = {}
    outside, after = 0, max(numbers.values()) + 1
    for name, path in zip(names, paths, strict=True):
        if path is not None:
            outside = after
            result[name] = numbers.get(path, numbers[path[0], None])
        else:
            result[name] = after if _LAST.search(name) else outside
    if after not in result.values():
        msg = (
            f"`layer_decay` needs a model with parameters after its layers, got none after {stack}"
        )
        raise ValueError(msg)
    return result


def _stack(network: nn.Module, names: Sequence[str]) -> str:
    """Return the name of the only outermost list of modules that has parameters."""
    lists = [
        plain_name(name)
        for name, module in network.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    stacks = {
        name
        for name in lists
        if not any(name.startswith(f"{outer}.") for outer in lists)
        and any(plain_name(each).startswith(f"{name}.") for each in names)
    }
    if len(stacks) != 1:
        msg = f"`layer_decay` needs a model with one list of layers, got {sorted(stacks) or 'none'}"
        raise ValueError(msg)
    return stacks.pop()


def _blocks(parts: Sequence[str | None]) -> list[str]:
    """Return the blocks of a stage in order; none if the stage has no list, or several."""
    blocks = sorted(
        {part for part in parts if part is not None}, key=lambda part: int(part.split(".")[1])
    )
    return blocks if len({block.split(".")[0] for block in blocks}) == 1 else []
