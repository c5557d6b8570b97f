"""The section ``optimizer`` of a recipe, and the optimizer that it builds."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from mfwrap.optimizers import AdamWeightDecay, ChainedOptimizer, Muon, QKClip, hidden_matrices
from mfwrap.runner.document import RecipeDocument
from mfwrap.runner.layer_decay import LayerDecaySection
from mfwrap.runner.objects import RecipeObjects, taken
from mfwrap.runner.own_code import OwnKind, OwnType
from mfwrap.runner.parameter_groups import RateGroup, first_match, parameter_groups
from mfwrap.runner.ranges import check_range, is_number
from mfwrap.runner.sections import OPTIMIZER_KEYS_WITHOUT_MEANING, MuonSection
from mfwrap.tensors.wrappers import plain_name

Make = Callable[[nn.Module, list[dict[str, Any]], TrainingArguments], Optimizer]
"""Function that builds an optimizer for a network, its parameter groups and the training's
arguments, which hold the learning rate, the betas and eps."""


@final
@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer that the recipe builds instead of the Trainer."""

    document: RecipeDocument
    """The recipe; supplies places for errors."""

    make: Make | None = None
    """Builds the optimizer; ``None`` for the one that ``optim`` of the training's arguments names.
    """

    rate_groups: tuple[RateGroup, ...] = ()
    """Parameters with a schedule of their own."""

    layer_decay: LayerDecaySection | None = None
    """Learning rates by layer; ``None`` for one rate. Excludes `rate_groups`."""

    qk_clip_threshold: float | None = None
    """Limit of the attention logits, see `QKClip`; ``None`` for no limit."""

    is_object: bool = False
    """Whether the optimizer comes from a program, which may have built it already."""

    decay_rules: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Patterns of names of the parameters with and without weight decay; the first rule counts, and
    what none matches has it by its kind. Source: MindFormers, ``weight_decay_include``."""

    def build(
        self, arguments: TrainingArguments, network: nn.Module, decayed: Collection[str]
    ) -> Optimizer:
        """Build the optimizer.

        Args:
            arguments: Arguments of the training.
            network: Network to train.
            decayed: Names of the parameters that have weight decay by their kind.

        Raises:
            RecipeError: If a group of ``grouped_lr_schedule`` has no parameter, if the network has
                no layers for ``layer_decay``, or if its attention logits cannot be limited.
        """
        optimizer = self._optimizer(arguments, network, decayed)
        if self.qk_clip_threshold is not None:
            try:
                QKClip(optimizer, network, self.qk_clip_threshold)
            except ValueError as error:
                path = ("optimizer", "qk_clip_threshold")
                raise self.document.error(path, f"must be left out: {error}") from error
        return optimizer

    def _optimizer(
        self, arguments: TrainingArguments, network: nn.Module, decayed: Collection[str]
    ) -> Optimizer:
        groups = self.groups(arguments, network, decayed)
        if self.make is not None:
            return self.make(network, groups, arguments)
        model: Any = network
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        optimizer: Optimizer = kind(groups, **settings)
        return optimizer

    def groups(
        self, arguments: TrainingArguments, network: nn.Module, decayed: Collection[str]
    ) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer.

        Args:
            arguments: Arguments of the training.
            network: Network to train.
            decayed: Names of the parameters that have weight decay by their kind.

        Raises:
            RecipeError: If a group of ``grouped_lr_schedule`` has no parameter, or the network has
                no layers for ``layer_decay``.
        """
        names = [name for name, _ in network.named_parameters()]
        rules = {name: first_match(plain_name(name), self.decay_rules) for name in names}
        by_kind = {None: decayed, 0: names}
        decayed = {name for name in names if name in by_kind.get(rules[name], ())}
        decay = arguments.weight_decay
        if self.layer_decay is None:
            return parameter_groups(self.document, network, self.rate_groups, decayed, decay)
        rate = arguments.learning_rate
        try:
            return self.layer_decay.groups(network, decayed, weight_decay=decay, learning_rate=rate)
        except ValueError as error:
            says = str(error).removeprefix("`layer_decay` ")
            raise self.document.error(("layer_decay",), says) from error


@final
@dataclass(frozen=True)
class _Kind:
    """How to build an optimizer of MindFormers."""

    optim: str | None = None
    """Value of the Trainer's ``optim``; ``None`` if the Trainer cannot build the optimizer."""

    make: Callable[..., Optimizer] | None = None
    """Builds the optimizer, with the fields of `section` as keywords."""

    section: type[Any] | None = None
    """Dataclass of the keys that are no fields of ``TrainingArguments``."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """MindFormers' defaults, where they differ from those of ``TrainingArguments``."""


def _adam_weight_decay(
    network: nn.Module,
    groups: list[dict[str, Any]],
    arguments: TrainingArguments,
    *,
    fp32_state: bool,
    bias_correction: bool = False,
) -> Optimizer:
    del network
    return AdamWeightDecay(
        groups,
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fp32_state=fp32_state,
        bias_correction=bias_correction,
    )


def _muon(
    network: nn.Module,
    groups: list[dict[str, Any]],
    arguments: TrainingArguments,
    *,
    section: MuonSection,
) -> Optimizer:
    """Build Muon for the matrices of a network that are not embeddings, and AdamW for the rest."""
    matrices = set(hidden_matrices(network).values())
    of_muon = [_part(group, matrices, is_in=True) for group in groups]
    of_adamw = [_part(group, matrices, is_in=False) for group in groups]
    rate = arguments.learning_rate
    optimizers: list[Optimizer] = []
    if any(of_muon):
        optimizers.append(
            Muon(
                list(filter(None, of_muon)),
                lr=rate,
                momentum=section.momentum,
                nesterov=section.nesterov,
                ns_steps=section.ns_steps,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if any(of_adamw):
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        optimizers.append(
            torch.optim.AdamW(
                list(filter(None, of_adamw)),
                lr=rate,
                betas=betas,
                eps=arguments.adam_epsilon,
                fused=True,
            )
        )
    return ChainedOptimizer(*optimizers)


def _part(group: dict[str, Any], chosen: Collection[Any], *, is_in: bool) -> dict[str, Any]:
    """Return a group with only some of its parameters; an empty dict if none is left."""
    parameters = [p for p in group["params"] if (p in chosen) is is_in]
    return group | {"params": parameters} if parameters else {}


_ADAMW = _Kind("adamw_torch_fused")
_HALF_ADAMW = _Kind(
    make=functools.partial(_adam_weight_decay, fp32_state=True, bias_correction=True)
)
"""AdamW for half-precision weights: its state is float32 in MindFormers, but not in torch."""

_EARLY_EPS = {"adam_epsilon": 1e-6}
_FP32_STATE = _Kind(
    make=functools.partial(_adam_weight_decay, fp32_state=True), defaults=_EARLY_EPS
)

OPTIMIZERS: Mapping[str, _Kind] = MappingProxyType(
    {
        "AdamW": _ADAMW,
        "AdamWeightDecay": _Kind(
            make=functools.partial(_adam_weight_decay, fp32_state=False), defaults=_EARLY_EPS
        ),
        "AdamWeightDecayX": _ADAMW,
        "Adafactor": _Kind("adafactor"),
        "FP32StateAdamWeightDecay": _FP32_STATE,
        "FusedAdamW": _ADAMW,
        "FusedAdamWeightDecay": _FP32_STATE,
        "FusedFP32StateAdamWeightDecay": _FP32_STATE,
        "Muon": _Kind(
            make=_muon,
            section=MuonSection,
            defaults={
                "adam_beta1": 0.95,
                "adam_beta2": 0.95,
                "adam_epsilon": 1e-8,
                "weight_decay": 0.1,
            },
        ),
    }
)
"""Optimizers of MindFormers by name."""

_PMA = (
    "write AdamW and a section ema, whose average stays beside the weights; MindFormers replaces "
    "the weights by theirs"
)
_ABSENT: Mapping[str, str] = {
    "CAME": "Adafactor, from which it stems, has second moments as small, but other updates",
    "FusedPmaAdamW": _PMA,
    "PmaAdamW": _PMA,
}
"""What to write instead of each optimizer of MindFormers that mfwrap lacks."""

_ARGUMENTS: Mapping[str, str] = {
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
}
"""Field of ``TrainingArguments`` for each key of the section ``optimizer``."""

_DECAY_RULES = ("weight_decay_include", "weight_decay_exclude")
"""Keys of all optimizers that choose the parameters with weight decay."""

_OWN = OwnKind(
    "a subclass of torch.optim.Optimizer, or a function of the parameter groups that builds one",
    lambda found: issubclass(found, Optimizer) if isinstance(found, type) else callable(found),
)
RATES = ("lr", "learning_rate")
"""Arguments of an optimizer's class that are its learning rate."""

_OF_MUON: Mapping[str, str] = {"adamw_betas": "betas", "adamw_eps": "eps"}
"""Key of the section for each key that MindFormers' Muon has instead."""

KEYS = frozenset({
    *("type", "betas", *_ARGUMENTS, *_OF_MUON, *_DECAY_RULES, *OPTIMIZER_KEYS_WITHOUT_MEANING),
    *(each.name for each in dataclasses.fields(MuonSection)),
})  # fmt: skip
"""Keys of the section ``optimizer`` for any optimizer of MindFormers."""


def read_optimizer(
    objects: RecipeObjects, section: Mapping[str, Any], *, are_half: bool
) -> tuple[OptimizerChoice | None, dict[str, Any], Mapping[str, Any]]:
    """Read the section ``optimizer``.

    Args:
        objects: Builder for the recipe.
        section: Content of the section.
        are_half: Whether the model's weights have half precision.

    Returns:
        The optimizer, or ``None`` if the Trainer builds it; the fields of ``TrainingArguments``
        that the section sets; and fields that get these values unless the recipe sets them.

    Raises:
        RecipeError: If the optimizer or a setting is unknown, or a value is out of range.
    """
    path = ("optimizer",)
    absent = section.get("type")
    if isinstance(absent, str) and absent in _ABSENT:
        says = f"mfwrap has no {absent}: {_ABSENT[absent]}"
        raise objects.document.error((*path, "type"), says)
    if (found := objects.own_type(path, section, _OWN)) is not None:
        return *_read_own(objects, found), {}
    name, settings = objects.named_type(path, section, OPTIMIZERS)
    kind = OPTIMIZERS[name]
    if kind is _ADAMW and are_half:
        kind = _HALF_ADAMW
    names = {key: key for key in ("betas", *_ARGUMENTS)}
    own: dict[str, Any] = {}
    if kind.section is not None:
        names = {
            key: _OF_MUON.get(key, key) for key in (*_OF_MUON, "learning_rate", "weight_decay")
        }
        others = {*names, *_DECAY_RULES, *OPTIMIZER_KEYS_WITHOUT_MEANING}
        own = {key: settings.pop(key) for key in settings.keys() - others}
    include, exclude = (_patterns(objects, settings, key) for key in _DECAY_RULES)
    known = {**names, **dict.fromkeys(_DECAY_RULES)}
    settings = objects.kept(path, settings, known, OPTIMIZER_KEYS_WITHOUT_MEANING)
    arguments: dict[str, Any] = {} if kind.optim is None else {"optim": kind.optim}
    for key, value in settings.items():
        for argument, number in _numbers(objects, key, names[key], value).items():
            arguments[argument] = _checked(objects, key, argument, number)
    choice = None
    if kind.section is not None and kind.make is not None:
        parsed = objects.parse(path, kind.section, own)
        make = functools.partial(kind.make, section=parsed)
        threshold = parsed.qk_clip_threshold
        choice = OptimizerChoice(objects.document, make, qk_clip_threshold=threshold)
    elif kind.make is not None:
        choice = OptimizerChoice(objects.document, kind.make)
    if include or exclude:
        choice = choice or OptimizerChoice(objects.document)
        choice = dataclasses.replace(choice, decay_rules=(include, exclude))
    return choice, arguments, kind.defaults


def _read_own(
    objects: RecipeObjects, own: OwnType
) -> tuple[OptimizerChoice | None, dict[str, Any]]:
    """Read the section of an optimizer of the user's own; see `read_optimizer`."""
    if own.found is None:
        return None, {}
    path, settings = ("optimizer",), dict(own.settings)
    include, exclude = (_patterns(objects, settings, key) for key in _DECAY_RULES)
    rates = [key for key in RATES if key in settings]
    if len(rates) > 1:
        says = f"must be left out, because the section has {rates[0]}"
        raise objects.document.error((*path, rates[1]), says)
    arguments = {
        argument: _checked(objects, key, argument, settings.pop(key))
        for argument, keys in {"learning_rate": rates, "weight_decay": ["weight_decay"]}.items()
        for key in keys
        if key in settings
    }
    settings = objects.checked_arguments(path, own.found, settings, num_passed=1, implied=RATES)

    def make(
        network: nn.Module, groups: list[dict[str, Any]], arguments: TrainingArguments
    ) -> Optimizer:
        del network
        bound = getattr(own.found, "keywords", ())  # of a functools.partial
        names = [name for name in taken(own.found, RATES) if name not in bound]
        rate = dict.fromkeys(names, arguments.learning_rate)
        made = objects.call(path, own.found, groups, **settings, **rate)
        if not isinstance(made, Optimizer):
            says = f"expected {_OWN.says}, but {own.name} built a {type(made).__name__}"
            raise objects.document.error((*path, "type"), says)
        return made

    is_object = path in objects.code.given
    rules = (include, exclude)
    choice = OptimizerChoice(objects.document, make, is_object=is_object, decay_rules=rules)
    return choice, arguments


def _checked(objects: RecipeObjects, key: str, argument: str, number: Any) -> float:
    """Return a number of the section if it is in the range of a field of ``TrainingArguments``."""
    if not is_number(number) or not number >= 0:
        says = f"expected a number >= 0, got {number!r}"
        raise objects.document.error(("optimizer", key), says)
    check_range(objects, ("optimizer", key), argument, number)
    return float(number)


def _patterns(objects: RecipeObjects, settings: dict[str, Any], key: str) -> list[str]:
    """Take a list of patterns of names."""
    value = settings.pop(key, None) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        says = f"expected a list of patterns of names, got {value!r}"
        raise objects.document.error(("optimizer", key), says)
    return value


def _numbers(objects: RecipeObjects, key: str, name: str, value: Any) -> dict[str, Any]:
    """Return the fields of ``TrainingArguments`` that a key of the section sets."""
    if name != "betas":
        return {_ARGUMENTS[name]: value}
    if not isinstance(value, list) or len(value) != 2:
        says = f"expected a list of two numbers, got {value!r}"
        raise objects.document.error(("optimizer", key), says)
    return {"adam_beta1": value[0], "adam_beta2": value[1]}
