"""Compare the runs of a step, and tell a wrong result from a program that is not deterministic."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch

from mfwrap.callbacks.culprit.anomaly_log import Anomaly
from mfwrap.callbacks.culprit.causes.evidence import Cause
from mfwrap.callbacks.culprit.notes import Note
from mfwrap.callbacks.culprit.replay.module_calls import Value
from mfwrap.callbacks.culprit.replay.recompute import SHARD, WEIGHT, StepRuns
from mfwrap.tensors.norm_groups import layer_of, layer_of_module

NUM_MEASURED = 2
"""Number of first checked steps in which is measured what is not deterministic. A faulty device
goes wrong in one of them, and not at the same place in both."""

_TENSORS = {
    "input": "the input of {}",
    "output": "the output of {}",
    "gradient of input": "the gradient of the input of {}",
    "gradient of output": "the gradient of the output of {}",
    WEIGHT: "the gradient of {}",
    SHARD: "the weight {}",
}
_WHERE = {"input": "received", "output": "activation"}
_MOST_NAMES = 3

_RECEIVED = Value("input", "")
"""The first input of the network itself."""

_Differing = Mapping[Value, tuple[int, ...]]
"""Values whose fingerprints differ between runs, each with that of each run, in the order in which
the step has computed them."""


class _Step(NamedTuple):
    number: int
    micro_batches: Sequence[_Differing]


@final
class RecomputeJudge:
    """Judge steps that were run several times on this rank.

    Args:
        rank: This rank.
        device: Name of its device, see `device_name`.
    """

    def __init__(self, rank: int, device: str) -> None:
        self._rank, self._device = rank, device
        self._measured: list[_Step] = []
        self._unstable: set[Value] | None = None
        self._has_noted_change = False

    def changed(self, number: int, name: str) -> list[Note]:
        """Return a note, the first time that the program has changed what a step is run from.

        Args:
            number: Number of the step.
            name: Input or weight that was changed.
        """
        if self._has_noted_change:
            return []
        self._has_noted_change = True
        cause = Cause(
            "changed_in_step",
            f"{name} was changed between the forward of the network and the update, by the forward "
            "or by the loop, so RecomputeCheck does not judge this step, nor others like it",
            "change a copy of an input, and weights only in the update",
        )
        return [Note(number, self._rank, cause)]

    def add(self, number: int, runs: StepRuns | None) -> list[Anomaly | Note]:
        """Return what the runs of a step have shown.

        Synchronizes with the device if there are runs.

        Args:
            number: Number of the step.
            runs: Its runs; ``None`` if they have the same fingerprints.
        """
        step = _Step(number, [] if runs is None else _differing(runs))
        if self._unstable is not None:
            return self._judged([step])
        self._measured.append(step)
        return self.end() if len(self._measured) == NUM_MEASURED else []

    def end(self) -> list[Anomaly | Note]:
        """Return what the measured steps have shown, if it has not been returned yet."""
        steps, self._measured = self._measured, []
        if not steps or self._unstable is not None:
            return []
        self._unstable = _unstable(steps)
        return [*self._noted(steps), *self._judged(steps)]

    def _noted(self, steps: Sequence[_Step]) -> list[Note]:
        """Return a note that names what is not deterministic."""
        unstable = self._unstable or set()
        differing = [each for step in steps for each in step.micro_batches]
        ordered = list(dict.fromkeys(key for each in differing for key in each if key in unstable))
        if not ordered:
            return []
        # What comes after the first value may differ because of it. Nothing depends on a weight's.
        first = next((n for n, key in enumerate(ordered) if key.what != WEIGHT), len(ordered) - 1)
        sources, behind = ordered[: first + 1], ordered[first + 1 :]
        shown = ", ".join(map(_named, sources[:_MOST_NAMES]))
        more = f" and {len(sources) - _MOST_NAMES} more" if sources[_MOST_NAMES:] else ""
        after = f", with {len(behind)} of the tensors that are computed later" if behind else ""
        cause = Cause(
            "not_deterministic",
            f"{shown}{more} differs when a step is run again from the same state{after}: the "
            "program is not deterministic, or a part of it is outside of the network's forward, so "
            "RecomputeCheck judges neither these tensors nor what is computed from them",
            "`torch.use_deterministic_algorithms(True)` makes kernels deterministic",
            tensors=(sources[0].name,),
        )
        return [Note(steps[0].number, self._rank, cause)]

    def _judged(self, steps: Sequence[_Step]) -> list[Anomaly | Note]:
        return [one for step in steps for one in self._judge(step)]

    def _judge(self, step: _Step) -> Sequence[Anomaly | Note]:
        """Return the anomaly of the first wrong value of the first micro-batch that has one.

        What the network receives, and its weights, are the program's. If these differ first, the
        device is not accused.
        """
        unstable = self._unstable or set()
        for number, differing in enumerate(step.micro_batches):
            for key, hashes in differing.items():
                if key not in unstable:
                    if key.what == SHARD or key._replace(number=0) == _RECEIVED:
                        return self.changed(step.number, _named(key))
                    others = sum(each not in unstable for each in differing) - 1
                    return [self._anomaly(step.number, number, key, hashes, others)]
                if key.what != WEIGHT:
                    break  # what is computed from this value may differ because of it
        return []

    def _anomaly(
        self, step: int, micro_batch: int, key: Value, hashes: tuple[int, ...], others: int
    ) -> Anomaly:
        layer = (layer_of if key.what == WEIGHT else layer_of_module)(key.name)
        behind = f", with {others} of the tensors that are computed later" if others else ""
        verdict, resume = _verdict(hashes)
        return Anomaly(
            step=step,
            kind="recompute_differs",
            ranks=(self._rank,),
            device=self._device,
            micro_batch=micro_batch,
            layer=layer or None,
            where=_WHERE.get(key.what, "gradient"),
            name=key.name or None,
            num_groups=others + 1,
            fingerprints=tuple(f"{each % 2**64:016x}" for each in hashes),
            cause="silent_data_corruption",
            explanation=f"{_named(key)} differs between {len(hashes)} runs of the step from the "
            f"same state{behind}; {verdict}",
            suggestion=f"take {self._device} of rank {self._rank} out and test it{resume}; if "
            "other devices show the same tensor, suspect its kernel or the driver instead",
        )


def _verdict(hashes: Sequence[int]) -> tuple[str, str]:
    """Say which run was wrong, as far as most runs agree, and what to do about the weights."""
    again = ", and resume from a checkpoint of an earlier step"
    usual, number = Counter(hashes).most_common(1)[0]
    if 2 * number <= len(hashes):
        return "it is unknown which of them is right", again
    if hashes[0] != usual:
        return "the repetitions agree, so the step itself and its update are wrong", again
    return "the step agrees with most repetitions, so its update is right", ""


def _named(key: Value) -> str:
    return _TENSORS[key.what].format(key.name or "the network")


def _differing(runs: StepRuns) -> list[_Differing]:
    by_value = iter(zip(*runs.hashes.tolist(), strict=True))
    # `zip` must ask the keys first: it would drop the hashes of the value after the last key.
    of_batches = [list(zip(keys, by_value, strict=False)) for keys in runs.values]
    return [{key: each for key, each in one if len(set(each)) > 1} for one in of_batches]


def _unstable(steps: Sequence[_Step]) -> set[Value]:
    """Return the values that differ without a fault.

    A fault makes one run of one step differ from all others. What differs in each step, or between
    more runs than one, is not deterministic. A single step does not tell.
    """
    in_steps = [
        {key: each for one in step.micro_batches for key, each in one.items()} for step in steps
    ]
    numbers = Counter(key for each in in_steps for key in each)
    irregular = {
        key
        for each in in_steps
        for key, hashes in each.items()
        if Counter(hashes).most_common(1)[0][1] < len(hashes) - 1
    }
    return irregular | {key for key, number in numbers.items() if number == len(steps)}


def device_name(device: torch.device) -> str:
    """Return what tells a device apart in a cluster: its number, model and UUID, and its host."""
    name = str(device)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name += f" ({found.name}, UUID {found.uuid})"
    return f"{name} on {platform.node() or 'an unknown host'}"
