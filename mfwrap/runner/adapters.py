"""The section ``peft`` of a recipe: an adapter, and adapters that fused layers share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mfwrap.arguments import check_number
from mfwrap.recipes.data.source import RecipeSection
from mfwrap.runner.objects import RecipeObjects

_NAME = "default"
"""PEFT's name of an adapter."""


@final
@dataclass(frozen=True, kw_only=True)
class AdapterSection(RecipeSection):
    """Keys of the section ``peft`` that PEFT does not have; they need the type ``lora``.

    Raises:
        ValueError: If a value is out of range.
    """

    shared_a: list[list[str]] = field(default_factory=list)
    """Lists of names of layers that are one layer elsewhere, such as ``[q_proj, k_proj, v_proj]``.
    The layers of a list have one matrix A and one dropout mask, and each has its own rows of B, as
    an adapter of the fused layer has. A model must call them in the order of the list."""

    a_std: float | None = None
    """Standard deviation of the initial A, drawn from a normal distribution; by default PEFT's own
    initialization."""

    b_std: float | None = None
    """Standard deviation of the initial B; 0 or ``None`` for zeros."""

    def __post_init__(self) -> None:
        """Check that values are in range."""
        for names in self.shared_a:
            if len(set(names)) < max(2, len(names)):
                msg = f"`shared_a` must have lists of two or more different names, got {names}"
                raise ValueError(msg)
        listed = [name for names in self.shared_a for name in names]
        if len(set(listed)) < len(listed):
            msg = f"`shared_a` must name each layer once, got {self.shared_a}"
            raise ValueError(msg)
        for name in ("a_std", "b_std"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))


@final
@dataclass(frozen=True)
class AdapterChoice:
    """An adapter of a recipe."""

    config: Any
    """PEFT's configuration."""

    section: AdapterSection = field(default_factory=AdapterSection)
    """What mfwrap does in addition."""

    @property
    def is_plain(self) -> bool:
        """Whether PEFT does everything."""
        return self.section == AdapterSection()

    def applied(self, network: nn.Module) -> Any:
        """Return the network with the adapter.

        Args:
            network: Network, whose layers are replaced.

        Raises:
            ValueError: If layers cannot share A; see `share_a`.
        """
        from peft import get_peft_model  # noqa: PLC0415  (slow; part of an extra)

        model: Any = network
        adapted = get_peft_model(model, self.config)
        for names in self.section.shared_a:
            share_a(adapted, names)
        for name, std in (("lora_A", self.section.a_std), ("lora_B", self.section.b_std)):
            if std is not None:
                _draw(adapted, name, std)
        return adapted


def read_peft(
    objects: RecipeObjects, section: Mapping[str, Any] | None, task_type: str | None
) -> AdapterChoice | None:
    """Return the adapter of a section ``peft``; ``None`` without the section.

    Args:
        objects: Builder for the recipe.
        section: ``type``, keys of `AdapterSection`, and arguments of PEFT's configuration.
        task_type: PEFT's name of the task; ``None`` if PEFT has none.

    Raises:
        RecipeError: If the adapter or a key is unknown, or PEFT is not installed.
    """
    if section is None:
        return None
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: PLC0415  (slow; part of an extra)
    except ImportError as error:
        says = 'needs PEFT; install it with pip install "mfwrap[recipes]"'
        raise objects.document.error(("peft",), says) from error
    settings = dict(section)
    kinds = {
        str(kind.value).lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
    name = objects.choice(("peft", "type"), settings.pop("type", "lora"), kinds)
    ours = {each.name for each in fields(AdapterSection)}
    own = {key: settings.pop(key) for key in ours & settings.keys()} if name == "lora" else {}
    if task_type is not None:
        settings.setdefault("task_type", task_type)
    parsed = objects.parse(("peft",), AdapterSection, own)
    config = objects.build(("peft",), kinds[name], settings)
    given = getattr(config, "init_lora_weights", True)
    if own and given not in (True, False, "gaussian"):
        # Other initializations fit B, and some the weights, to the A of each layer.
        says = f"must be left out with {min(own)}, which replaces initial matrices"
        raise objects.document.error(("peft", "init_lora_weights"), f"{says}, got {given!r}")
    return AdapterChoice(config, parsed)


def share_a(network: nn.Module, names: Sequence[str]) -> None:
    """Give LoRA layers one matrix A and one dropout mask, in every module that has the layers.

    Together, the layers then compute what a single LoRA layer computes whose weight and whose B
    are made of their rows.

    Args:
        network: Network with PEFT's LoRA.
        names: Names of the layers in their module, in the order in which they are called.

    Raises:
        ValueError: If no module has all of the layers with adapters, or if only some layers of a
            module have adapters, or their inputs have different sizes.
    """
    is_found = False
    for place, module in network.named_modules():
        children: dict[str, Any] = dict(module.named_children())
        first, *others = (children.get(name) for name in names)
        shapes = {_shape_of_a(layer) for layer in (first, *others)}
        if first is None or None in others or shapes == {None}:
            continue
        is_found = True
        if len(shapes) > 1:
            msg = f"`shared_a` must name layers with adapters for one input, got {names} of {place}"
            raise ValueError(msg)
        dropout = first.lora_dropout[_NAME]
        mask = _Mask()
        for number, layer in enumerate((first, *others)):
            layer.lora_A[_NAME] = first.lora_A[_NAME]
            if isinstance(dropout, nn.Dropout):
                is_last = number == len(others)
                shared = _SharedDropout(dropout.p, mask, is_first=not number, is_last=is_last)
                layer.lora_dropout[_NAME] = shared
    if not is_found:
        says = "which no module has with adapters"
        msg = f"`shared_a` must name layers of one module, got {list(names)}, {says}"
        raise ValueError(msg)


class _Mask:
    """A dropout mask from the call of the first layer to that of the last one."""

    value: Tensor | None = None


@final
class _SharedDropout(nn.Module):
    """Dropout whose mask the first layer draws, and the others use.

    The first layer always draws, so a call that ends between the layers has no effect on the next.
    Recomputed activations get the same mask, because their random generator is restored.
    """

    def __init__(self, p: float, mask: _Mask, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.p = p
        self._mask = mask
        self._is_first = is_first
        self._is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self._is_first:
            self._mask.value = functional.dropout(torch.ones_like(x), self.p)
        mask = self._mask.value
        if mask is None:
            msg = "layers that share A must be called in the order of `peft.shared_a`"
            raise RuntimeError(msg)
        if self._is_last:
            self._mask.value = None
        return x * mask


def _shape_of_a(layer: Any) -> torch.Size | None:
    """Return the shape of a layer's matrix A; ``None`` without an adapter of linear layers."""
    matrices = getattr(layer, "lora_A", {})
    return matrices[_NAME].weight.shape if _NAME in matrices else None


def _draw(network: nn.Module, matrix: str, std: float) -> None:
    """Draw the initial values of all matrices A or B of a network with PEFT's LoRA."""
    # `named_parameters` names a shared matrix once, so it is drawn once.
    for name, parameter in network.named_parameters():
        if f".{matrix}.{_NAME}." in name:
            nn.init.normal_(parameter, std=std)
