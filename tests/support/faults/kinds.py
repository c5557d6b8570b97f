"""Kinds of faults, and what is true about each."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.faults.networks import Architecture
from support.faults.planting import (
    Around,
    Fault,
    Planted,
    Spoil,
    activation,
    all_gradients,
    bright_row,
    collapsed_router,
    gradient,
    growing_query,
    heavy_decay,
    large_variance,
    layer_gradients,
    loss_factor,
    moments,
    nan_buffers,
    nan_moments,
    nan_row,
    no_targets,
    noisy_gradients,
    noisy_weights,
    one_target,
    other_targets,
    weight_element,
    whole_weight,
)

__all__ = ["KINDS", "Kind", "Truth", "plant", "truth_of"]

NAN, INF = float("nan"), float("inf")

_SAMPLE_INTERVAL = 10
"""Steps from one sample of weights and optimizer state to the next, the monitor's default."""

_ALWAYS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """What is true about a fault. ``None`` means that there is no such place."""

    step: int
    at_once: int
    """Last step at which a record is at once."""

    last_step: int
    """Last step at which a record is in time."""

    finite: bool
    """Whether losses and gradients stay finite."""

    causes: tuple[str, ...]
    """Causes that are true."""

    layer: str | None
    """Layer of the fault. A record may leave the layer out; it must not name another one."""

    rank: int | None
    micro_batch: int | None
    rows: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault."""

    cause: str
    """Cause as a record names it."""

    also: tuple[str, ...] = ()
    """Other causes that are true as well."""

    finite: bool = True
    held_out: bool = False
    """Whether judges must not be tuned on this kind."""

    rate: float = 1.0
    """Factor of the learning rate during the fault."""

    data: Spoil | None = None
    around: Around | None = None
    outside: float = 1.0
    """Factor of the loss of the micro-batch outside of the network."""

    dtype: str = "float32"
    """Type of the weights that the fault needs."""

    num_steps: int = 1
    """Number of steps of the fault."""

    earliest: int = 3
    """First step at which this is a fault, such as a wrong target in a network that has learned."""

    latest: int = 70
    """Last step at which this is a fault."""

    patience: int = 1
    """Number of steps after the first one of the fault in which a record is at once."""

    sampled: bool = False
    """Whether weights or optimizer state may be all that shows the fault. They are read every ten
    steps, so a record is in time up to the next of these."""

    in_layer: bool = False
    """Whether the fault is in a layer."""

    in_micro_batch: bool = False
    """Whether the fault is in one micro-batch of one rank, and not in all of them."""

    in_row: bool = False
    on_all_ranks: bool = True
    """Whether all ranks have the fault. A fault of one micro-batch is on one rank in any case."""

    min_ranks: int = 1
    """Smallest number of ranks with which this is a fault."""

    ways: tuple[str, ...] = ("cell", "attach", "trainer")
    """Ways of training in which this is a fault."""

    needs: Callable[[Architecture], bool] = lambda _: True
    """Whether an architecture can have the fault."""

    @property
    def is_local(self) -> bool:
        """Whether one rank alone has the fault."""
        return self.in_micro_batch or not self.on_all_ranks


def plant(planted: Planted, fault: Fault, rank: int) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the steps of a fault; a null context if another rank has the fault."""
    kind = KINDS[fault.kind]
    if kind.around is None or not (kind.on_all_ranks or rank == fault.rank):
        return contextlib.nullcontext()
    return kind.around(planted, fault)


def truth_of(fault: Fault, architecture: Architecture) -> Truth:
    """Return what is true about a fault in a network of this architecture."""
    kind = KINDS[fault.kind]
    at_once = fault.step + kind.patience
    next_sample = ((at_once - 1) // _SAMPLE_INTERVAL + 1) * _SAMPLE_INTERVAL
    return Truth(
        step=fault.step,
        at_once=at_once,
        last_step=max(at_once, next_sample if kind.sampled else 0),
        finite=kind.finite,
        causes=(kind.cause, *kind.also),
        layer=architecture.layer_name(fault.layer) if kind.in_layer else None,
        rank=fault.rank if kind.is_local else None,
        micro_batch=fault.micro_batch if kind.in_micro_batch else None,
        rows=(fault.row,) if kind.in_row else None,
    )


def _has_tokens(architecture: Architecture) -> bool:
    return not architecture.images


def _has_batch_norm(architecture: Architecture) -> bool:
    return architecture.weight == "convolution.weight"


def _has_images_without_batch_norm(architecture: Architecture) -> bool:
    return architecture.images and not _has_batch_norm(architecture)


def _learns(architecture: Architecture) -> bool:
    return architecture.learns


def _has_query(architecture: Architecture) -> bool:
    return architecture.query is not None


def _has_router(architecture: Architecture) -> bool:
    return architecture.router is not None


_IN_BATCH: dict[str, Any] = {"in_micro_batch": True}
_IN_ROW: dict[str, Any] = {"in_micro_batch": True, "in_row": True}
_IN_LAYER: dict[str, Any] = {"in_layer": True}
_IN_LAYER_OF_BATCH: dict[str, Any] = {"in_layer": True, "in_micro_batch": True}

_FINITE = {
    "rate times 300": Kind(cause="learning_rate", rate=300.0),
    "rate times 3000": Kind(cause="learning_rate", rate=3_000.0, held_out=True),
    "rate too high from the start": Kind(
        cause="learning_rate", rate=100.0, num_steps=_ALWAYS, earliest=1, latest=1, patience=5
    ),
    "rate times 100 from a step on": Kind(
        cause="learning_rate", rate=100.0, num_steps=_ALWAYS, held_out=True
    ),
    "one target": Kind(
        cause="data", data=one_target, num_steps=5, earliest=60, latest=90, needs=_learns
    ),
    "other targets": Kind(
        cause="data",
        data=other_targets,
        num_steps=5,
        earliest=60,
        latest=90,
        needs=_learns,
        held_out=True,
    ),
    "one rank's targets": Kind(
        cause="rank_data",
        also=("data",),
        data=one_target,
        num_steps=5,
        earliest=60,
        latest=90,
        needs=_learns,
        on_all_ranks=False,
        min_ranks=2,
    ),
    # A LayerNorm takes the factor out again, here and in "activation times -1000".
    "bright image": Kind(
        cause="data",
        also=("batch_norm", "rank_data"),
        data=bright_row,
        needs=_has_batch_norm,
        held_out=True,
        **_IN_ROW,
    ),
    "first moments times 1e5": Kind(
        cause="optimizer_state", around=moments("exp_avg", 1e5), sampled=True
    ),
    "first moments times 1e6": Kind(
        cause="optimizer_state", around=moments("exp_avg", 1e6), sampled=True
    ),
    "second moments times 1e-8": Kind(
        cause="optimizer_state", around=moments("exp_avg_sq", 1e-8), sampled=True
    ),
    "weight times 2**14": Kind(
        cause="weight_changed", around=weight_element(2.0**14), sampled=True, **_IN_LAYER
    ),
    "noise in a weight": Kind(
        cause="weight_changed", around=noisy_weights, sampled=True, held_out=True, **_IN_LAYER
    ),
    "gradient times 1000": Kind(cause="gradient", around=gradient(1e3), **_IN_LAYER),
    "gradients of a layer times 1000": Kind(
        cause="gradient", around=layer_gradients(1e3), held_out=True, **_IN_LAYER
    ),
    "dead layer": Kind(
        cause="dead_layer",
        around=layer_gradients(0.0),
        num_steps=_ALWAYS,
        sampled=True,
        **_IN_LAYER,
    ),
    "activation times -1000": Kind(
        cause="activation",
        also=("data", "rank_data"),
        needs=_has_batch_norm,
        data=activation(4),
        **_IN_LAYER_OF_BATCH,
    ),
    "growing query": Kind(
        cause="attention_logits",
        also=("weight_changed",),
        around=growing_query,
        num_steps=15,
        patience=15,
        needs=_has_query,
        sampled=True,
        **_IN_LAYER,
    ),
    "router": Kind(
        cause="router",
        also=("weight_changed",),
        around=collapsed_router,
        needs=_has_router,
        sampled=True,
        **_IN_LAYER,
    ),
    "rate times 30": Kind(cause="learning_rate", rate=30.0, num_steps=3, patience=3, held_out=True),
    "weight zeroed": Kind(
        cause="weight_changed",
        around=whole_weight(0.0),
        sampled=True,
        held_out=True,
        **_IN_LAYER,
    ),
    "weight negated": Kind(
        cause="weight_changed",
        around=whole_weight(-1.0),
        sampled=True,
        held_out=True,
        **_IN_LAYER,
    ),
    "second moments zeroed": Kind(
        cause="optimizer_state",
        also=("optimizer_epsilon",),
        around=moments("exp_avg_sq", 0.0),
        sampled=True,
    ),
    "noise in a gradient": Kind(
        cause="gradient", around=noisy_gradients, held_out=True, **_IN_LAYER
    ),
    "running variance times 10000": Kind(
        cause="batch_norm",
        also=("buffer_changed",),
        around=large_variance,
        needs=_has_batch_norm,
        sampled=True,
        **_IN_LAYER,
    ),
    "weight decay times 100000": Kind(
        cause="weight_decay",
        also=("learning_rate", "optimizer_state"),
        around=heavy_decay,
        sampled=True,
    ),
    "loss times 0.001": Kind(cause="loss", data=loss_factor(5)),
    "constant in the loss": Kind(cause="loss", data=loss_factor(6), held_out=True),
    "all gradients zero": Kind(cause="dead_layer", also=("gradient",), around=all_gradients(0.0)),
    "all gradients times 0.0001": Kind(
        cause="gradient", also=("loss",), around=all_gradients(1e-4), held_out=True
    ),
    "loss times 1000": Kind(cause="loss", data=loss_factor(1), **_IN_BATCH),
    "loss outside times 1000": Kind(cause="loss", outside=1e3, ways=("attach",), **_IN_BATCH),
    "NaN in a running variance": Kind(
        cause="batch_norm",
        around=nan_buffers,
        needs=_has_batch_norm,
        sampled=True,
        held_out=True,
        **_IN_LAYER,
    ),
}

_NON_FINITE = {
    # Second moments in float16, and 1e-8, round to 0: the first update divides by 0.
    "epsilon in float16": Kind(
        cause="optimizer_epsilon", dtype="float16", ways=("cell",), earliest=1, latest=1
    ),
    "loss NaN": Kind(cause="loss", data=loss_factor(2), **_IN_BATCH),
    "loss infinite": Kind(cause="loss", data=loss_factor(3), held_out=True, **_IN_BATCH),
    "loss outside NaN": Kind(cause="loss", outside=NAN, ways=("attach",), **_IN_BATCH),
    # MFTrainer divides by the number of targets of the whole step, so there the loss stays finite.
    "no targets": Kind(
        cause="data", data=no_targets, ways=("cell", "attach"), needs=_has_tokens, **_IN_BATCH
    ),
    "image NaN": Kind(cause="data", data=nan_row, needs=_has_images_without_batch_norm, **_IN_ROW),
    "image NaN in BatchNorm": Kind(
        cause="batch_norm", also=("data",), data=nan_row, needs=_has_batch_norm, **_IN_ROW
    ),
    "activation NaN": Kind(cause="activation", data=activation(2), **_IN_LAYER_OF_BATCH),
    "activation infinite": Kind(
        cause="activation", data=activation(3), held_out=True, **_IN_LAYER_OF_BATCH
    ),
    "gradient NaN": Kind(cause="gradient", around=gradient(NAN), **_IN_LAYER),
    "gradient infinite": Kind(cause="gradient", around=gradient(INF), **_IN_LAYER),
    "gradient NaN on one rank": Kind(
        cause="gradient",
        around=gradient(NAN),
        on_all_ranks=False,
        min_ranks=2,
        held_out=True,
        **_IN_LAYER,
    ),
    "weight NaN": Kind(cause="weight_changed", around=weight_element(NAN), **_IN_LAYER),
    "weight infinite": Kind(
        cause="weight_changed", around=weight_element(INF), held_out=True, **_IN_LAYER
    ),
    "weight NaN on one rank": Kind(
        cause="weight_changed",
        around=weight_element(NAN),
        on_all_ranks=False,
        min_ranks=2,
        **_IN_LAYER,
    ),
    "moments NaN": Kind(cause="optimizer_state", around=nan_moments, **_IN_LAYER),
}

KINDS = _FINITE | {
    name: dataclasses.replace(kind, finite=False) for name, kind in _NON_FINITE.items()
}
"""Kinds of faults by name."""
