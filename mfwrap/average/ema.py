"""Keep an exponential moving average of weights, without host-device synchronization."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from mfwrap.arguments import check_bool, check_int, check_real, described
from mfwrap.average.profiles import gamma_of
from mfwrap.average.swap import Swap
from mfwrap.average.tensors import (
    buffer_places,
    check_names,
    copied,
    fitting_tensors,
    follow_buffers,
    named_weights,
    write,
)
from mfwrap.average.weights import AveragedWeights
from mfwrap.tensors.shards import on_device
from mfwrap.tensors.wrappers import plain_name, reshard, sharded_parts, unwrapped_network


class Average(Protocol):
    """Interface of the average: `ExponentialMovingAverage`, or one optimizer's share of it."""

    def begin_update(self) -> None:
        """Start to average new trainable weights; raise ``RuntimeError`` if `update` would."""

    def update(self, applied: Tensor, /) -> None:
        """Update the average from the new weights if the update was applied."""


@final
class ExponentialMovingAverage:
    """Keep an exponential moving average of weights; skipped updates leave the average unchanged.

    The average starts as a copy of the weights. Each averaging step computes
    ``average += (1 - decay) * (weight - average)`` for all weights of one dtype and device at once.
    On a CPU, with the default `warmup`, `device` and `dtype`, averages of float32 and float64
    weights are bitwise equal to those of ``torch.optim.swa_utils.get_ema_multi_avg_fn``. On CUDA,
    those of float32 weights are rounded in another order, because the kernel is that of fused SGD.
    The factor ``1 - decay`` is a tensor on the device, so that a skipped update can replace it by 0
    without synchronization.

    If `parameters` is a module, its parameters that require a gradient are averaged, under the
    names of ``named_parameters()``. Tied parameters are averaged once. Persistent buffers, such as
    running statistics, are not averaged but copied at each averaging step. If `parameters` is an
    iterable, every tensor is averaged, under the names ``"0"``, ``"1"``, ...

    A frozen parameter is averaged as soon as it requires a gradient. In a training step, its
    average starts from the weight before the first update that may change it, so it is what it
    would be if the parameter had been averaged from the beginning. In a loop that calls `update`
    itself, it starts from the weight at the next call; call `begin_update` before the optimizer's
    step to start it earlier.

    The average keeps references to the parameter tensors. Move, convert or shard a module before
    you build its average. After ``fully_shard`` the averages are distributed tensors like the
    weights, and no shard is gathered: each rank averages, swaps and saves its own shards.

    Args:
        parameters: Weights to average: a module, or floating-point tensors.
        decay: Weight of the old average in the new one, in [0, 1).
        warmup: Use the decay ``min(decay, (1 + n) / (10 + n))``, where ``n`` is the number of
            updates applied before this one. The first steps of training then lose their influence
            quickly.
        update_every: Average at every `update_every`-th call of `update`; 1 averages at each call.
            A call for a skipped update counts, too. `decay` is not adjusted to `update_every`: pass
            ``decay**update_every`` for an average that reaches as far back as with 1. With
            `sigma_rel`, the average keeps its length.
        device: Device of the averages; by default each weight's device. If the averages are on the
            CPU and the weights are not, each averaging step synchronizes with the device.
        dtype: Floating-point dtype of the averages. The default is the dtype of each weight, but at
            least float32, because an average in bfloat16 stops moving when its increments round to
            zero. Weights of a different dtype are converted in pieces of 8 million numbers.
        sigma_rel: Relative length of a power-function average, in (0, 0.2886], instead of a
            `decay`: the decay of the ``t``-th applied update is ``(s / t)**(gamma + 1)``, where
            ``s`` is the number of updates that the average holds already. The average then
            reaches back over the same share of the training at any time. Several
            lengths, such as ``(0.05, 0.10)``, keep several averages, each with the memory of one.
            The first is the one that is swapped in, copied and exported; all are in the state,
            from which `mfwrap average` builds an average of any length after the training.

    Raises:
        TypeError: If an argument has the wrong type, or a tensor is not floating-point.
        ValueError: If an argument is out of range, `sigma_rel` is combined with `decay` or
            `warmup`, or there are no weights to average.

    Example:
        >>> import torch
        >>> from mfwrap import ExponentialMovingAverage
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> ema = ExponentialMovingAverage(model, decay=0.75)
        >>> _ = torch.nn.init.ones_(model.weight)  # an optimizer's update
        >>> ema.update()
        >>> ema.update(applied=torch.tensor(False))  # a skipped update changes nothing
        >>> with ema.swap():
        ...     model.weight.item()
        0.25
        >>> model.weight.item()
        1.0

    Source: ``torch.optim.swa_utils`` (update); ``num_updates`` of TensorFlow's
    ``tf.train.ExponentialMovingAverage`` (warm-up); Karras et al. 2024, "Analyzing and Improving
    the Training Dynamics of Diffusion Models", section 3 (power function).
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor],
        decay: float = 0.999,
        warmup: bool = False,  # noqa: FBT001, FBT002  (positional after `decay`, as is usual)
        update_every: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sigma_rel: float | Sequence[float] | None = None,
    ) -> None:
        decay = checked_decay(decay)
        check_placement(device, dtype)
        self._warmup = check_bool("warmup", warmup)
        self._update_every = check_int("update_every", update_every)
        self._sigmas, exponents = _lengths(sigma_rel)
        if self._sigmas and (decay, self._warmup) != (0.999, False):
            msg = (
                "`sigma_rel` must be given without `decay` and `warmup`, got "
                f"decay={decay}, warmup={warmup}"
            )
            raise ValueError(msg)
        if isinstance(parameters, Iterator):
            parameters = list(parameters)
        self.settings: dict[str, Any] = {"sigma_rel": self._sigmas} if self._sigmas else {}
        """Decay and warm-up, or the lengths, and how often it averages."""
        self.settings |= {} if self._sigmas else {"decay": decay, "warmup": self._warmup}
        self.settings["update_every"] = self._update_every
        self._from_module = isinstance(parameters, nn.Module)
        self._buffer_places = buffer_places(parameters)
        self._sharded_parts = sharded_parts(parameters) if isinstance(parameters, nn.Module) else []
        self._all = [
            AveragedWeights(parameters, decay, device, dtype, exponent) for exponent in exponents
        ]
        self._held = self._all[0]
        self._buffers = {
            name: copied(place.tensor(), device, None)
            for name, place in self._buffer_places.items()
        }
        training_device = next(iter(self._held.weights.values())).device
        self._applied_updates = torch.zeros((), dtype=torch.int64, device=training_device)
        self._averaged_updates = self._applied_updates.clone()
        """Number of updates that power-function averages hold."""
        self._num_calls = 0
        self._swap: Swap | None = None

    @torch.no_grad()
    def update(self, applied: Tensor | None = None) -> None:
        """Update the average after an optimizer update; call it after every step.

        Synchronizes with the device only if the averages are on the CPU and the weights are not. A
        skipped update leaves the copied buffers bitwise unchanged. If the weights are finite, a
        skipped update also leaves the averages bitwise unchanged, except that an average of -0.0
        may become 0.0.

        Args:
            applied: Whether the optimizer's update was applied: shape ``()``, bool, on the
                training device. The flag stays on the device. ``None`` means that the update was
                applied.

        Raises:
            TypeError: If `applied` is not a bool tensor.
            ValueError: If `applied` has a different shape.
            RuntimeError: If called inside `swap`, or if a weight was moved or converted.
        """
        check_applied(applied)
        self.begin_update()
        is_averaged = (self._num_calls + 1) % self._update_every == 0
        if is_averaged:
            num_updates = self._applied_updates if self._warmup or self._sigmas else None
            for held in self._all:
                for group in held.groups:
                    group.follow(group.share(num_updates, self._averaged_updates, applied))
            follow_buffers(self._buffers.values(), self._current_buffers(), applied)
        self._num_calls += 1
        if applied is None:
            self._applied_updates.add_(1)
        else:
            self._applied_updates.add_(on_device(applied, self._applied_updates.device))
        if is_averaged and self._sigmas:
            follow_buffers([self._averaged_updates], [self._applied_updates], applied)

    def begin_update(self) -> None:
        """Start to average weights that were frozen before, and check that `update` can follow.

        The training step calls it before it changes any weight. Does not synchronize with the
        device.

        Raises:
            RuntimeError: If called inside `swap`, or if a weight was moved or converted after its
                average was built.
        """
        self.refuse_inside_swap("update")
        for held in self._all:
            held.begin_update()

    def count_replay(self) -> None:
        """Count a call of `update` that a graph of the device has replayed."""
        self._num_calls += 1

    @property
    def obstacle_to_capture(self) -> str | None:
        """Why a graph of the device cannot hold `update`; ``None`` if it can."""
        if self._update_every > 1:
            return f"if `ema` does not follow each update, got update_every={self._update_every}"
        weights = zip(self._held.weights.values(), self._held.averages.values(), strict=True)
        if any(weight.device != average.device for weight, average in weights):
            return "if the averages of `ema` are on another device than the weights"
        return None

    @property
    def is_on_accelerator(self) -> bool:
        """Whether an average takes memory of another device than the CPU."""
        return any(average.device.type != "cpu" for average in self._held.averages.values())

    @property
    def sigma_rel(self) -> tuple[float, ...]:
        """Relative lengths of power-function averages; empty for an exponential average."""
        return tuple(self._sigmas)

    @property
    def is_swapped(self) -> bool:
        """Whether the averages are in the parameters, inside a block of `swap`.

        False inside a block of `training_weights`.
        """
        return self._swap is not None and self._swap.is_in

    @property
    def is_swap_nested(self) -> bool:
        """Whether the averages are in the parameters, and one block of `swap` is inside another."""
        return self._swap is not None and self._swap.is_in and self._swap.num_nested > 0

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Put the averages into the parameters and buffers inside the block, for evaluation.

        After the block the original values are restored bitwise, even if the block raises. Anything
        written into parameters and buffers inside the block is lost. The block needs memory for a
        copy of the weights, about as much as gradients take. mfwrap's monitors read the original
        values; use `training_weights` in code of your own that must do so.

        A block inside a block of the same average changes nothing: the averages are in the
        parameters already, and the end of the outer block restores the values.
        """
        before = self._swap
        if before is not None and before.is_in:
            with before.nested():
                yield
            return
        swap = self._swap = Swap(
            list(self._held.weights.values()), self._current_buffers, self._reshard
        )
        try:
            self._fill(self._held.weights.values(), self._current_buffers())
            yield
        finally:
            swap.end()
            self._swap = before

    def copy_to(self, parameters: nn.Module | Iterable[Tensor] | None = None) -> None:
        """Write the averages into parameters in place; write nothing if a tensor does not fit.

        If the average was built from a module and `parameters` is a module, too, averages and
        buffers are matched by name. Otherwise averages are matched by position, and buffers are not
        written. If a target is distributed differently from its average, the average is gathered;
        all ranks must then call this method.

        Args:
            parameters: Module or tensors to write into, of any floating-point dtype on any device;
                by default the averaged parameters themselves and the buffers of their module.

        Raises:
            KeyError: If the module lacks a parameter or buffer of the average.
            TypeError: If `parameters` holds anything but floating-point tensors.
            ValueError: If the number of tensors, a shape or a dtype does not fit.
            RuntimeError: If called without `parameters` inside `swap`, because the end of the
                `swap` block would undo the call.
        """
        if parameters is None:
            self.refuse_inside_swap("copy_to")
            self._reshard()
            self._fill(self._held.weights.values(), self._current_buffers())
        elif self._from_module and isinstance(parameters, nn.Module):
            reshard(parameters)
            network = unwrapped_network(parameters)
            named_parameters = network.named_parameters(remove_duplicate=False)
            named_buffers = network.named_buffers(remove_duplicate=False)
            weights: dict[str, Tensor] = {plain_name(n): tensor for n, tensor in named_parameters}
            buffers = {plain_name(n): tensor for n, tensor in named_buffers}
            self._fill(
                fitting_tensors("parameters", weights, self._held.averages),
                fitting_tensors("parameters", buffers, self._buffers),
            )
        else:
            if isinstance(parameters, nn.Module):
                reshard(parameters)
                parameters = parameters.parameters()
            targets = named_weights(parameters)
            if len(targets) != len(self._held.averages):
                msg = f"`parameters` must be {len(self._held.averages)} tensors, got {len(targets)}"
                raise ValueError(msg)
            by_name = dict(zip(self._held.averages, targets.values(), strict=True))
            self._fill(fitting_tensors("parameters", by_name, self._held.averages))

    def follows(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any of `parameters` belongs to this average, now or once trainable."""
        return self._held.any_of(parameters)

    def check_placement(self) -> None:
        """Raise ``RuntimeError`` if a weight was moved or converted after construction."""
        for held in self._all:
            held.check_placement()

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the averages to the current weights and buffers, and the counters to 0.

        Raises:
            RuntimeError: If called inside `swap`.
        """
        self.refuse_inside_swap("restart")
        for held in self._all:
            write(held.averages.values(), held.weights.values())
        write(self._buffers.values(), self._current_buffers())
        self._applied_updates.zero_()
        self._averaged_updates.zero_()
        self._num_calls = 0

    def named_averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the average of each weight: the live tensor, not a copy."""
        yield from self._held.averages.items()

    def state_dict(self) -> dict[str, Any]:
        """Return averages, copied buffers and counters, as tensors by name.

        Averages and buffers are the live tensors, as in ``nn.Module.state_dict``: clone them if
        they must not change while training continues. Settings such as `decay` are not included.
        No synchronization with the device.
        """
        if not self.is_swapped:
            for held in self._all:
                held.start_trainable()
        return self._state()

    def _state(self) -> dict[str, Any]:
        counters = {
            "applied_updates": self._applied_updates.clone(),
            "num_calls": torch.full((), self._num_calls, dtype=torch.int64, device="cpu"),
        }
        if self._sigmas:
            counters["averaged_updates"] = self._averaged_updates.clone()
            counters["sigma_rel"] = torch.tensor(self._sigmas, dtype=torch.float64, device="cpu")
        averages = {part: dict(held.averages) for part, held in self._parts()}
        return {**averages, "buffers": dict(self._buffers), "counters": counters}

    def _parts(self) -> Iterator[tuple[str, AveragedWeights]]:
        """Yield the averages of each length, with their name in the state."""
        for number, held in enumerate(self._all):
            yield part_of_state(number), held

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, or change nothing if it does not fit.

        Weights that are frozen at present are averaged from now on if they were when the state was
        saved.

        Args:
            state: State of an average with the same names and shapes. Values are converted to the
                dtypes and devices of this average.

        Raises:
            KeyError: If a name is missing or unknown.
            TypeError: If an entry is not a mapping, or holds anything but tensors.
            ValueError: If a shape, a dtype or a `sigma_rel` does not fit, or a counter is negative.
            RuntimeError: If called inside `swap`.
        """
        self.refuse_inside_swap("load_state_dict")
        fitting = self.check_state_dict(state)
        applied_updates, num_calls, *averaged_updates = fitting["counters"][:3]
        for part, held in self._parts():
            held.start(state[part])
            write(held.averages.values(), fitting[part])
        write(self._buffers.values(), fitting["buffers"])
        write([self._applied_updates], [applied_updates])
        if averaged_updates:
            write([self._averaged_updates], averaged_updates)
        self._num_calls = int(num_calls)

    def check_state_dict(self, state: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Raise the errors of `load_state_dict` without changing anything.

        Returns:
            Lists of the tensors in ``averages``, ``buffers`` and ``counters`` of `state`, each in
            this average's order.
        """
        expected = self._state()
        check_names("state", state, expected)
        for part, held in self._parts():
            if isinstance(state[part], Mapping):
                expected[part] = held.started_with(state[part])
        fitting = {}
        for part, tensors in expected.items():
            check_names(part, state[part], tensors)
            fitting[part] = fitting_tensors(part, state[part], tensors)
        applied_updates, num_calls, *saved = fitting["counters"]
        if saved and saved[-1].tolist() != self._sigmas:
            msg = f"`sigma_rel` must be {self._sigmas}, as given, got {saved[-1].tolist()}"
            raise ValueError(msg)
        if int(applied_updates) < 0 or int(num_calls) < 0:
            msg = f"`counters` must be >= 0, got {applied_updates} and {num_calls}"
            raise ValueError(msg)
        return fitting

    def _reshard(self) -> None:
        # After a forward without a backward, a module may still hold gathered parameters. The next
        # forward would then ignore values that are written into the shards.
        for part in self._sharded_parts:
            part.reshard()

    def _current_buffers(self) -> list[Tensor]:
        return [place.tensor() for place in self._buffer_places.values()]

    def _fill(self, weights: Collection[Tensor], buffers: Collection[Tensor] = ()) -> None:
        """Write the averages into `weights`, and the copied buffers into `buffers`."""
        write(weights, self._held.averages.values())
        if buffers:
            write(buffers, self._buffers.values())

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` inside the block of `swap`.

        Args:
            method: Name of the called method, for the message.
        """
        if self.is_swapped:
            msg = f"`{method}` must not be called inside `swap`; call it after the block"
            raise RuntimeError(msg)


def part_of_state(number: int) -> str:
    """Return the name in the state of the averages of the length with this number, from 0."""
    return f"averages_{number}" if number else "averages"


def _lengths(
    sigma_rel: float | Sequence[float] | None,
) -> tuple[list[float], Sequence[float | None]]:
    """Return the relative lengths and ``gamma + 1`` of each; no length and ``None`` without."""
    if sigma_rel is None:
        return [], [None]
    sigmas: list[float] = [*sigma_rel] if isinstance(sigma_rel, Sequence) else [sigma_rel]
    exponents = [gamma_of(sigma) + 1 for sigma in sigmas]
    if not sigmas or len({*sigmas}) < len(sigmas):
        msg = f"`sigma_rel` must be one or several different numbers, got {sigma_rel}"
        raise ValueError(msg)
    return [float(sigma) for sigma in sigmas], exponents


def checked_decay(decay: float) -> float:
    """Return `decay` as a float if it is a number in [0, 1); otherwise raise an error."""
    check_real("decay", decay)
    if not 0 <= decay < 1:
        msg = f"`decay` must be in [0, 1), got {decay}"
        raise ValueError(msg)
    return float(decay)


def check_placement(device: object, dtype: object) -> None:
    """Check the arguments `device` and `dtype` of an average; ``None`` stands for the default."""
    if not (device is None or isinstance(device, (str, torch.device))):
        msg = f"`device` must be a torch.device, a string or None, got {described(device)}"
        raise TypeError(msg)
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        msg = f"`dtype` must be a torch.dtype or None, got {described(dtype)}"
        raise TypeError(msg)
    if dtype is not None and not dtype.is_floating_point:
        msg = f"`dtype` must be a floating-point dtype, got {dtype}"
        raise ValueError(msg)


def check_applied(applied: object) -> None:
    """Check that `applied` is ``None`` or a bool tensor of shape ``()``; raise an error if not."""
    if applied is None:
        return
    if not isinstance(applied, Tensor) or applied.dtype != torch.bool:
        msg = f"`applied` must be a bool tensor or None, got {described(applied)}"
        raise TypeError(msg)
    if applied.dim() != 0:
        msg = f"`applied` must have shape (), got {tuple(applied.shape)}"
        raise ValueError(msg)
