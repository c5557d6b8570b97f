"""The exponential moving average of weights, kept without waiting for the device."""

import contextlib
import numbers
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.arguments import check_bool, check_positive_int, described
from mfwrap.averaged_tensors import (
    buffer_places,
    check_names,
    fitting_tensors,
    named_weights,
)
from mfwrap.devices import on_device
from mfwrap.wrappers import plain_name, unwrapped_network

__all__ = ["ExponentialMovingAverage"]


class _Group(NamedTuple):
    """Averages of one dtype on one device, and the weights they follow."""

    weights: list[Tensor]
    averages: list[Tensor]
    converted: bool
    """Whether the weights are of another dtype or on another device than their averages."""

    smoothing_factor: Tensor
    """``1 - decay``, shape ``()``, of the averages' dtype and on their device."""

    zero: Tensor
    nine: Tensor


@final
class ExponentialMovingAverage:
    """Keep an exponential moving average of weights that follows applied updates only.

    The average starts as a copy of the weights. An update is
    ``average += (1 - decay) * (weight - average)``, one ``torch._foreach_lerp_`` for each dtype and
    device; bitwise ``torch.optim.swa_utils.get_ema_multi_avg_fn``, unless `warmup` or `dtype` ask
    for something else. (On CUDA that call runs one kernel for each weight, because its factors stay
    on the device.)

    Of a module, the parameters that require a gradient at construction are averaged, tied ones
    once, under the names of ``named_parameters()``; frozen ones are the same in both. Persistent
    buffers (running statistics) are copied at each averaging call, not averaged. Of an iterable,
    every tensor is averaged, under the names ``"0"``, ``"1"``, ...

    The parameters are remembered themselves, so what changes them in place is followed; move or
    convert a module before.

    Args:
        parameters: What to average: a module, or floating-point tensors.
        decay: Share of the old average in the new one, in [0, 1).
        warmup: Decay by ``min(decay, (1 + n) / (10 + n))``, with ``n`` the updates applied before
            this one, so that the start of training is soon forgotten.
        update_every: Average at every so many calls of `update`, those for skipped updates
            counted. The decay is not adapted to it.
        device: Where the averages live; by default, where each weight does. With averages that
            are kept on the CPU for weights that are not, an averaging call waits for the device.
        dtype: Floating-point dtype of the averages. By default float32 for weights of fewer bits
            (an average in bfloat16 stalls: its increments round to nothing), else the weight's
            own. Weights of another dtype are converted one tensor at a time.

    Raises:
        TypeError: If an argument has the wrong type, or a tensor is not floating-point.
        ValueError: If an argument is out of range, or there is nothing to average.

    Example:
        >>> import torch
        >>> from mfwrap import ExponentialMovingAverage
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> ema = ExponentialMovingAverage(model, decay=0.75)
        >>> _ = torch.nn.init.ones_(model.weight)  # an optimizer's update
        >>> ema.update()
        >>> ema.update(applied=torch.tensor(False))  # a skipped one changes nothing
        >>> with ema.swap():
        ...     model.weight.item()
        0.25
        >>> model.weight.item()
        1.0

    Source: ``torch.optim.swa_utils`` (update); ``num_updates`` of TensorFlow's
    ``tf.train.ExponentialMovingAverage`` (warm-up).
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor],
        decay: float = 0.999,
        warmup: bool = False,  # noqa: FBT001, FBT002 - by position after `decay`, as is usual
        update_every: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        decay = _checked_decay(decay)
        _check_placement(device, dtype)
        self._warmup = check_bool("warmup", warmup)
        self._update_every = check_positive_int("update_every", update_every)
        self._from_module = isinstance(parameters, nn.Module)
        self._weights = named_weights(parameters)
        self._buffer_places = buffer_places(parameters)
        self._averages = {
            name: _copy(weight, device, dtype or _average_dtype(weight))
            for name, weight in self._weights.items()
        }
        self._buffers = {
            name: _copy(place.tensor(), device, None) for name, place in self._buffer_places.items()
        }
        self._groups = _grouped(self._weights, self._averages, decay)
        training_device = next(iter(self._weights.values())).device
        self._applied_updates = torch.zeros((), dtype=torch.int64, device=training_device)
        self._num_calls = 0
        self._swapped = False

    @torch.no_grad()
    def update(self, applied: Tensor | None = None) -> None:
        """Follow one optimizer update; call it after every one, applied or skipped.

        Does not wait for the device. A skipped update changes nothing under ``torch.equal``, as
        long as the weights are finite.

        Args:
            applied: Whether the optimizer's update was applied: shape ``()``, bool, on the
                training device, not read on the host. ``None`` says that it was.

        Raises:
            TypeError: If `applied` is not a bool tensor.
            ValueError: If `applied` has another shape.
            RuntimeError: If called inside `swap`.
        """
        _check_applied(applied)
        self.refuse_inside_swap("update")
        if (self._num_calls + 1) % self._update_every == 0:
            for group in self._groups:
                _average(group, self._smoothing_factor(group, applied))
            self._follow_buffers(applied)
        self._num_calls += 1
        if applied is None:
            self._applied_updates.add_(1)
        else:
            self._applied_updates.add_(on_device(applied, self._applied_updates.device))

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Hold the averages in the parameters and buffers inside the block, for evaluation.

        The raw values come back bitwise after the block, also when it raises; what is written into
        parameters and buffers inside it is lost. Takes memory for a copy of the weights, about
        what released gradients have just freed.

        Raises:
            RuntimeError: If called inside `swap`.
        """
        self.refuse_inside_swap("swap")
        with torch.no_grad():
            raw_weights = [weight.clone() for weight in self._weights.values()]
            raw_buffers = [buffer.clone() for buffer in self._current_buffers()]
        self._swapped = True
        try:
            self._fill(self._weights.values(), self._current_buffers())
            yield
        finally:
            _write(self._weights.values(), raw_weights)
            _write(self._current_buffers(), raw_buffers)
            self._swapped = False

    def copy_to(self, parameters: nn.Module | Iterable[Tensor] | None = None) -> None:
        """Write the averages into parameters in place; nothing is written if one does not fit.

        From module to module they go by name, and buffers with them; otherwise by position.

        Args:
            parameters: Where to write, of any floating-point dtype, on any device; by default
                the parameters that are averaged here, and their module's buffers.

        Raises:
            KeyError: If the module lacks a name that is averaged here.
            TypeError: If anything else than floating-point tensors is given.
            ValueError: If the number of tensors, a shape or a dtype does not fit.
            RuntimeError: If called inside `swap` by default, because leaving it would undo this.
        """
        if parameters is None:
            self.refuse_inside_swap("copy_to")
            self._fill(self._weights.values(), self._current_buffers())
        elif self._from_module and isinstance(parameters, nn.Module):
            network = unwrapped_network(parameters)
            named_parameters = network.named_parameters(remove_duplicate=False)
            named_buffers = network.named_buffers(remove_duplicate=False)
            weights: dict[str, Tensor] = {plain_name(n): tensor for n, tensor in named_parameters}
            buffers = {plain_name(n): tensor for n, tensor in named_buffers}
            self._fill(
                fitting_tensors("parameters", weights, self._averages),
                fitting_tensors("parameters", buffers, self._buffers),
            )
        else:
            if isinstance(parameters, nn.Module):
                parameters = parameters.parameters()
            targets = named_weights(parameters)
            if len(targets) != len(self._averages):
                msg = f"`parameters` must be {len(self._averages)} tensors, got {len(targets)}"
                raise ValueError(msg)
            by_name = dict(zip(self._averages, targets.values(), strict=True))
            self._fill(fitting_tensors("parameters", by_name, self._averages))

    def follows(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any of these tensors is one that is averaged here."""
        followed = {id(weight) for weight in self._weights.values()}
        return any(id(parameter) in followed for parameter in parameters)

    def check_placement(self) -> None:
        """Raise ``RuntimeError`` if weights were moved or converted after construction."""
        for group in self._groups:
            for weight, average in zip(group.weights, group.averages, strict=True):
                differ = (weight.device, weight.dtype) != (average.device, average.dtype)
                if differ != group.converted:
                    msg = (
                        f"`ema` must be built where its weights are, on {weight.device} in "
                        f"{weight.dtype}, got averages on {average.device} in {average.dtype}; "
                        "build it after the network has been moved"
                    )
                    raise RuntimeError(msg)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew, from the weights and buffers as they are.

        Raises:
            RuntimeError: If called inside `swap`.
        """
        self.refuse_inside_swap("restart")
        _write(self._averages.values(), self._weights.values())
        _write(self._buffers.values(), self._current_buffers())
        self._applied_updates.zero_()
        self._num_calls = 0

    def named_averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each averaged weight with its average: the live tensor, no copy."""
        yield from self._averages.items()

    def state_dict(self) -> dict[str, Any]:
        """Return averages, copied buffers and counters, as tensors by name.

        The averages and buffers are the live tensors, as in ``nn.Module.state_dict``: clone what
        must stay as it is while training goes on. Settings are no part of it. Does not wait for
        the device.
        """
        return {
            "averages": dict(self._averages),
            "buffers": dict(self._buffers),
            "counters": {
                "applied_updates": self._applied_updates.clone(),
                "num_calls": torch.full((), self._num_calls, dtype=torch.int64),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is changed if anything does not fit.

        Args:
            state: Of an average of the same names and shapes; values are converted to the dtypes
                and devices of this one.

        Raises:
            KeyError: If a name is missing or unknown.
            TypeError: If a part is not a mapping or holds anything else than tensors.
            ValueError: If a shape or a dtype does not fit, or a counter is negative.
            RuntimeError: If called inside `swap`.
        """
        self.refuse_inside_swap("load_state_dict")
        fitting = self.check_state_dict(state)
        applied_updates, num_calls = fitting["counters"]
        _write(self._averages.values(), fitting["averages"])
        _write(self._buffers.values(), fitting["buffers"])
        _write([self._applied_updates], [applied_updates])
        self._num_calls = int(num_calls)

    def check_state_dict(self, state: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Raise what `load_state_dict` would raise of `state`, and change nothing.

        Returns:
            The tensors of each part, in this average's order.
        """
        expected = self.state_dict()
        check_names("state", state, expected)
        fitting = {}
        for part, tensors in expected.items():
            check_names(part, state[part], tensors)
            fitting[part] = fitting_tensors(part, state[part], tensors)
        applied_updates, num_calls = fitting["counters"]
        if int(applied_updates) < 0 or int(num_calls) < 0:
            msg = f"`counters` must be >= 0, got {applied_updates} and {num_calls}"
            raise ValueError(msg)
        return fitting

    def _smoothing_factor(self, group: _Group, applied: Tensor | None) -> Tensor:
        """Return the share of the weights in the new averages: 0 if the update was skipped."""
        factor = group.smoothing_factor
        if self._warmup:
            # 1 - (1 + n) / (10 + n), written so that nothing cancels.
            num_updates = on_device(self._applied_updates, factor.device)
            factor = torch.maximum(group.nine / (num_updates + 10), factor)
        if applied is None:
            return factor
        return torch.where(on_device(applied, factor.device), factor, group.zero)

    def _follow_buffers(self, applied: Tensor | None) -> None:
        if applied is None:
            _write(self._buffers.values(), self._current_buffers())
            return
        for copy, buffer in zip(self._buffers.values(), self._current_buffers(), strict=True):
            condition = on_device(applied, copy.device)
            torch.where(condition, on_device(buffer, copy.device), copy, out=copy)

    def _current_buffers(self) -> list[Tensor]:
        return [place.tensor() for place in self._buffer_places.values()]

    def _fill(self, weights: Collection[Tensor], buffers: Collection[Tensor] = ()) -> None:
        """Write the averages into weights, and the copies into buffers if there are any."""
        _write(weights, self._averages.values())
        if buffers:
            _write(buffers, self._buffers.values())

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are in the parameters.

        Args:
            method: Name of what must not be called then.
        """
        if self._swapped:
            msg = f"`{method}` must not be called inside `swap`; leave its block first"
            raise RuntimeError(msg)


def _average(group: _Group, smoothing_factor: Tensor) -> None:
    """Move the averages towards the weights; the factor is not read on the host."""
    if not group.converted:
        # One factor for each tensor: a single one would be taken for a number, and read.
        factors = [smoothing_factor] * len(group.averages)
        torch._foreach_lerp_(group.averages, group.weights, factors)
        return
    for average, weight in zip(group.averages, group.weights, strict=True):
        average.lerp_(torch.empty_like(average).copy_(weight), smoothing_factor)


@torch.no_grad()
def _write(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    written = list(targets)
    if written:
        torch._foreach_copy_(written, list(values))


def _copy(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(device=device, dtype=dtype, copy=True)


def _average_dtype(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.dtype.itemsize < torch.float32.itemsize else weight.dtype


def _grouped(
    weights: Mapping[str, Tensor], averages: Mapping[str, Tensor], decay: float
) -> list[_Group]:
    """Group by device and dtype, once, so that no call has to."""
    members: dict[object, list[str]] = {}
    for name, weight in weights.items():
        average = averages[name]
        key = (weight.device, weight.dtype, average.device, average.dtype)
        members.setdefault(key, []).append(name)
    groups = []
    for names in members.values():
        weight, average = weights[names[0]], averages[names[0]]
        groups.append(
            _Group(
                weights=[weights[name] for name in names],
                averages=[averages[name] for name in names],
                converted=(weight.device, weight.dtype) != (average.device, average.dtype),
                # Subtracted in Python: in float32, 1 - 0.9999 is 1.00017e-4.
                smoothing_factor=average.new_full((), 1 - decay),
                zero=average.new_full((), 0.0),
                nine=average.new_full((), 9.0),
            )
        )
    return groups


def _checked_decay(decay: float) -> float:
    if isinstance(decay, bool) or not isinstance(decay, numbers.Real):
        msg = f"`decay` must be a number, got {described(decay)}"
        raise TypeError(msg)
    if not 0 <= decay < 1:
        msg = f"`decay` must be in [0, 1), got {decay}"
        raise ValueError(msg)
    return float(decay)


def _check_placement(device: object, dtype: object) -> None:
    if not (device is None or isinstance(device, (str, torch.device))):
        msg = f"`device` must be a device, its name or None, got {described(device)}"
        raise TypeError(msg)
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        msg = f"`dtype` must be a torch.dtype or None, got {described(dtype)}"
        raise TypeError(msg)
    if dtype is not None and not dtype.is_floating_point:
        msg = f"`dtype` must be a floating-point dtype, got {dtype}"
        raise ValueError(msg)


def _check_applied(applied: object) -> None:
    if applied is None:
        return
    if not isinstance(applied, Tensor) or applied.dtype != torch.bool:
        msg = f"`applied` must be a bool tensor or None, got {described(applied)}"
        raise TypeError(msg)
    if applied.dim() != 0:
        msg = f"`applied` must have shape (), got {tuple(applied.shape)}"
        raise ValueError(msg)
