"""Keep what modules returned in an earlier step, to tell whether the program has changed since."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.replay.module_calls import ModuleCall, ModuleCalls, Value
from mfwrap.callbacks.culprit.replay.recorder import (
    RecordedCall,
    StepRecorder,
    loss_of,
    tensors_in,
)
from mfwrap.callbacks.culprit.replay.replay import attempted
from mfwrap.tensors.module_hooks import keep_out_of_copies

_INTERVAL = 8
"""Number of steps from one reference to the next."""

_DEPTH, _MOST = 4, 96
"""Largest depth of a module that is looked at, and largest number of them."""

_SAMPLE = 256
"""Largest number of elements that are kept of a value."""

_OTHER, _SAME = 0.8, 0.25
"""Smallest distance of two outputs that are others, and the largest one of values that are as
before, as shares of the earlier value. Few updates make a difference between the two."""

_FARTHER = 3.0
"""Smallest ratio of the distance of an output that is another one to that of the weight."""


class ProgramChange(NamedTuple):
    """What an earlier call gives with the present weights and the present program."""

    num_steps: int
    """Age of the call, in steps."""

    then: float
    again: float
    """Loss of the call then and now; NaN if the network returned none."""

    name: str | None
    """First module that returns something else, although what it receives is as before."""

    distance: float
    """Distance of its output from that of then, as a share of it; without a module, that of the
    last output."""


class _Reference(NamedTuple):
    call: RecordedCall
    samples: Mapping[Value, Tensor]


@final
class References:
    """Take samples of the first call of each eighth step, and keep the last two.

    Costs at most 256 elements of what each of the outer modules receives and returns, and of its
    weight, in the eighth step, and the inputs of two calls; does not synchronize with the device.

    Args:
        recorder: Recorder of the network.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._kept: list[_Reference] = []
        self._outputs: _Outputs | None = None
        self._last: RecordedCall | None = None
        network = recorder.network
        self._handles = (
            network.register_forward_pre_hook(self._begin),
            network.register_forward_hook(self._end),
        )
        keep_out_of_copies(network, *self._handles)

    def close(self) -> None:
        """Remove the hooks, and release all values."""
        for handle in self._handles:
            handle.remove()
        self._stop()
        self._kept, self._last = [], None

    def _begin(self, network: nn.Module, _: Any) -> None:
        self._stop()  # of a call that has raised an error
        call = self._recorder.first_call
        # A call that is not recorded, such as one of an evaluation, comes after another one.
        is_new = call is not None and call is not self._last
        self._last = call
        if is_new and call is not None and call.step % _INTERVAL == 0:
            self._outputs = _Outputs(network)

    def _end(self, _network: nn.Module, _inputs: Any, _output: Any) -> None:
        call = self._recorder.first_call
        if self._outputs is not None and call is not None:
            self._kept = [*self._kept[-1:], _Reference(call, self._outputs.samples)]
        self._stop()

    def _stop(self) -> None:
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    def change(self, num_bad: int) -> ProgramChange | None:
        """Run an earlier call again, and compare it with what it gave then.

        Random states and buffers are restored. Synchronizes with the device, starts no collective,
        and never raises an error of the network.

        Args:
            num_bad: Number of last steps that went wrong, before which the call must be.

        Returns:
            ``None`` if there is no such call, or if it cannot be run again.
        """
        last = self._recorder.last_step
        known = [one for one in self._kept if last and one.call.step <= last[0].step - num_bad]
        if not known:
            return None
        call, samples = known[-1]
        found = attempted(self._recorder, lambda: _called(self._recorder, call), None)
        if found is None:
            return None
        again, outputs = found
        name, distance = _first_other(_distances(samples, outputs))
        then = math.nan if call.loss is None else call.loss.item()
        return ProgramChange(last[0].step - call.step, then, again, name, distance)


@final
class _Outputs(ModuleCalls):
    """Take samples of what the outer modules of a network receive and return."""

    def __init__(self, network: nn.Module) -> None:
        self.samples: dict[Value, Tensor] = {}
        named = [(n, m) for n, m in network.named_modules() if n and n.count(".") < _DEPTH]
        super().__init__(named[:_MOST])

    def received(self, call: ModuleCall, arguments: Any) -> None:
        self._take(call.value("received"), arguments)
        self._take(call.value("weight"), list(call.module.parameters(recurse=False)))

    def returned(self, call: ModuleCall, output: Any) -> None:
        self._take(call.value("returned"), output)

    def _take(self, key: Value, value: Any) -> None:
        tensors = (one for _, one in tensors_in(value) if one.is_floating_point())
        first = next((one for one in tensors if one.numel() > 1), None)
        if first is not None:
            flat = first.detach().reshape(-1)
            # An odd distance meets all columns of a matrix with an even number of them.
            distance = -(-flat.numel() // _SAMPLE) | 1
            self.samples[key] = flat[::distance].float().clone()


def _called(recorder: StepRecorder, call: RecordedCall) -> tuple[float, dict[Value, Tensor]]:
    with _Outputs(recorder.network) as outputs, torch.no_grad():
        loss = loss_of(call.run(recorder))
    return math.nan if loss is None else loss.item(), outputs.samples


def _distances(then: Mapping[Value, Tensor], now: Mapping[Value, Tensor]) -> dict[Value, float]:
    """Return the distance of each value from that of then, in the order of the call."""
    found = {}
    for key, sample in then.items():
        again = now.get(key)
        if again is not None and again.shape == sample.shape:
            size = torch.linalg.vector_norm(sample).item()
            distance = torch.linalg.vector_norm(again - sample).item()
            # What is infinite may be a mask.
            if 0 < size < math.inf and not math.isnan(distance):
                found[key] = distance / size
    return found


def _first_other(distances: Mapping[Value, float]) -> tuple[str | None, float]:
    """Return the first module that returns something else, and by how much.

    Of a module and those inside of it, the innermost one is first. In a module that holds others,
    the small differences of many layers add up: it is named only if its own parts have few.
    """
    returned = {key: far for key, far in distances.items() if key.what == "returned"}
    for key, distance in returned.items():
        parts = [far for each, far in returned.items() if each.name.startswith(f"{key.name}.")]
        # What an embedding receives are numbers of tokens, which are those of then.
        received = distances.get(key._replace(what="received"), 0.0)
        # Another weight, by the updates since then, gives another output.
        least = max(_OTHER, _FARTHER * distances.get(key._replace(what="weight"), 0.0))
        if distance > least and max(received, *parts, 0.0) < _SAME + _SAME * bool(parts):
            return key.name, distance
    return None, next(reversed(returned.values()), math.nan)
