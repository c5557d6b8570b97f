"""Judge weights, optimizer state and buffers every few steps, on the device."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.callbacks.culprit.anomaly_log import StateNorm
from mfwrap.callbacks.culprit.judges.step import highest
from mfwrap.callbacks.culprit.judges.windows import NamedWindow, decoded, encoded
from mfwrap.tensors.norms import as_real, norms_of_each
from mfwrap.tensors.shards import local_tensors
from mfwrap.tensors.wrappers import plain_name, trainable, unwrapped_network, unwrapped_optimizer

LIMIT = 12.0
"""Smallest score that is an anomaly, see `RobustWindow`."""

_LARGE_RISE = math.log(100.0)
"""Smallest logarithm of a rise that is an anomaly at a third of the limit: early in a training, a
buffer may vary so much that no rise would reach the limit."""

MOST_RISE = 4.0
"""Largest ratio of a norm to an earlier one that is no anomaly."""

LEAST_FALL = 1 / 5
"""Smallest ratio of the norm of a second moment to an earlier one that is no anomaly."""

_SETTLED, _EARLY_RISE = 20, 20.0
"""Step from which on running statistics have settled: before, they grow up to tenfold from those of
the first batch. And the smallest rise before that is an anomaly."""

SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
"""Optimizer states that average squares of gradients, and so fall slowly."""

WEIGHT, BUFFER = "weight", "buffer"

_FAR = 2.0
"""Largest ratio of the growth of a weight to its updates that they explain. The updates are those
of a few elements, so the ratio may be above 1."""

_PRIOR = 0.3
"""Deviation of a norm's logarithm that is assumed before there are values."""

_FLOORS = {WEIGHT: 1.0}
"""Share of the typical size of tensors of a kind below which a norm is judged as if it had it: a
bias that began at zero may grow by any factor."""

_FLOOR = 0.1
"""Share for other kinds than weights."""


class StateSample(NamedTuple):
    """Norms of ``K`` tensors after a step, on the device."""

    step: int
    tensors: tuple[tuple[str, str], ...]
    """Kind and name of each tensor, see `StateNorm`."""

    sizes: tuple[int, ...]
    norms: Tensor
    """Shape ``(K,)``, float32."""


@final
class StateJudge:
    """Score the norms of weights, optimizer state and buffers by the samples before.

    A sample reads each tensor once: with Adam, this is three times the memory of the weights. It
    does not synchronize with the device. Of sharded tensors, a rank judges its own shards.

    Args:
        network: Network with or without wrappers; the first sample is taken immediately.
        step: Finished steps.
    """

    def __init__(self, network: nn.Module, step: int = 0) -> None:
        self._network = network
        self._device = next((p.device for p in network.parameters()), torch.device("cpu"))
        self._window = NamedWindow()
        self._samples: deque[StateSample] = deque(maxlen=3)
        self._last_layout: _Layout | None = None
        self.sample(step, None)

    @torch.no_grad()
    def sample(self, step: int, optimizer: Any) -> Tensor:
        """Score the present norms, and then include them in what is usual.

        Args:
            step: Finished steps.
            optimizer: Optimizer with or without wrappers; ``None`` if unknown.

        Returns:
            The highest score of the norm of a weight or a buffer, NaN without a score, and the
            number of tensors that have become non-finite since the sample before; shape ``(2,)``,
            float32.
        """
        taken = self._measure(step, optimizer)
        before = self._samples[-1] if self._samples else taken
        names = [" ".join(each) for each in taken.tensors]
        window = self._window.use(names, [_PRIOR] * len(names), self._device)
        values = torch.maximum(taken.norms, self._floors(taken, before)).log()
        scores = window.scores(values)
        is_large = (values - window.expected > _LARGE_RISE) & (scores > LIMIT / 3)
        scores = torch.where(is_large, 3 * scores, scores)
        if before.step < _SETTLED and before.tensors == taken.tensors:
            is_little = taken.norms < _EARLY_RISE * before.norms
            scores = torch.where(self._layout(taken).is_buffer & is_little, torch.nan, scores)
        window.add(values)
        # The moments of an optimizer rise and fall with the gradients. If they change by
        # themselves, the next update is an anomaly.
        of_network = sum(kind in {WEIGHT, BUFFER} for kind, _ in taken.tensors)
        self._samples.append(taken)
        return torch.cat([highest(scores[:of_network]), self._num_bad(taken, before)])

    def look(self, step: int, optimizer: Any) -> None:
        """Keep the present norms for a comparison, but leave them out of what is usual.

        Args:
            step: Finished steps.
            optimizer: Optimizer with or without wrappers; ``None`` if unknown.
        """
        self._samples.append(self._measure(step, optimizer))

    def risen(self, step: int, optimizer: Any = None) -> list[StateNorm]:
        """Return the tensors whose norm has become non-finite or has risen more than fourfold.

        Also the second moments that have fallen to less than a fifth.

        The norms now are compared with the last finite ones of a sample before the step. The norm
        of a small tensor, such as a bias that began at zero, is compared with what is typical of
        its kind. Reads the tensors, and synchronizes with the device.

        Args:
            step: Step that went wrong.
            optimizer: Optimizer with or without wrappers; ``None`` leaves its state out.

        Returns:
            The tensors by their rise or fall, the largest first.
        """
        earlier = [each for each in self._samples if each.step < step]
        earlier = earlier or [self._samples[0]]
        now = self._measure(step, optimizer)
        norms = self._exact_norms(now, optimizer)
        floors = self._floors(now, earlier[-1]).tolist()
        # A weight may have become non-finite in the update before the last sample.
        known = {
            key: norm
            for sample in earlier
            for key, norm in zip(sample.tensors, sample.norms.tolist(), strict=True)
            if math.isfinite(norm)
        }
        found = []
        for key, norm, floor in zip(now.tensors, norms, floors, strict=True):
            norm_before = known.get(key)
            if norm_before is None:
                continue
            rise = norm / max(norm_before, floor, 1e-30)
            fall = norm / max(norm_before, 1e-30)
            has_fallen = key[0] in SECOND_MOMENTS and norm_before > 0 and fall < LEAST_FALL
            is_early = key[0] == BUFFER and earlier[-1].step < _SETTLED
            # Written so that NaN counts as risen.
            if has_fallen or not rise <= (_EARLY_RISE if is_early else MOST_RISE):
                rise = rise if math.isfinite(rise) else math.inf
                rise = fall if has_fallen else rise
                kind, name = key
                found.append(
                    StateNorm(kind=kind, name=name, norm=norm, norm_before=norm_before, rise=rise)
                )
        return sorted(found, key=lambda each: -max(each.rise, 1 / max(each.rise, 1e-30)))

    def driven(self, risen: Iterable[StateNorm], travelled: Mapping[str, float]) -> tuple[str, ...]:
        """Return the weights whose growth is no larger than their updates since the last sample.

        A weight whose updates are unknown is one of them: nothing speaks against its updates.

        Args:
            risen: What `risen` returned.
            travelled: Sum of the root mean squares of these updates, of each weight.
        """
        last = self._samples[-1]
        sizes = {
            name: size
            for (kind, name), size in zip(last.tensors, last.sizes, strict=True)
            if kind == WEIGHT
        }
        return tuple(
            one.name
            for one in risen
            if one.kind == WEIGHT
            and _growth(one, sizes.get(one.name, 0)) <= _FAR * travelled.get(one.name, math.inf)
        )

    def undivided(self, optimizer: Any, names: Collection[str]) -> dict[str, str]:
        """Tell which of these weights an optimizer of Adam's kind updates without a denominator.

        Args:
            optimizer: Optimizer with or without wrappers; ``None`` if unknown.
            names: Names of weights. Their state is read, which synchronizes with the device.

        Returns:
            Why the update of a weight is divided by zero, in a clause, by the weight's name.
        """
        inner = unwrapped_optimizer(optimizer)
        if not isinstance(inner, Optimizer):
            return {}
        epsilons = {
            id(weight): group.get("eps")
            for group in inner.param_groups
            for weight in group["params"]
        }
        found = {}
        for name, weight in trainable(self._network).items():
            epsilon, moments = epsilons.get(id(weight)), inner.state.get(weight, {})
            if name not in names or not isinstance(epsilon, float):
                continue
            if isinstance(moments.get("exp_avg_sq"), Tensor) and "exp_avg" in moments:
                why = _why_undivided(moments, epsilon)
                if why is not None:
                    found[name] = why
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, and the last samples, ready for JSON; synchronizes."""
        samples = [
            {
                "step": sample.step,
                "tensors": [list(tensor) for tensor in sample.tensors],
                "sizes": list(sample.sizes),
                "norms": encoded(sample.norms),
            }
            for sample in self._samples
        ]
        return {**self._window.state_dict(), "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._window.load_state_dict(state)
        self._samples.clear()
        for one in state["samples"]:
            norms = decoded(one["norms"], 1).reshape(-1).to(self._device)
            tensors = tuple((kind, name) for kind, name in one["tensors"])
            self._samples.append(StateSample(one["step"], tensors, tuple(one["sizes"]), norms))

    def weight_norms(self) -> dict[str, float]:
        """Return the norm of each weight in the last sample; synchronizes."""
        last = self._samples[-1]
        pairs = zip(last.tensors, last.norms.tolist(), strict=True)
        return {name: norm for (kind, name), norm in pairs if kind == WEIGHT}

    @property
    def num_weights(self) -> int:
        """Number of weights in the last sample."""
        return sum(kind == WEIGHT for kind, _ in self._samples[-1].tensors)

    def _measure(self, step: int, optimizer: Any) -> StateSample:
        tensors = dict(self._tensors(optimizer))
        shards = local_tensors([each.detach() for each in tensors.values()])
        norms = norms_of_each(shards, self._device) if shards else torch.zeros(0)
        sizes = tuple(shard.numel() for shard in shards)
        return StateSample(step, tuple(tensors), sizes, norms)

    def _exact_norms(self, sample: StateSample, optimizer: Any) -> list[float]:
        """Return the norms of a sample that was just taken; only non-finite tensors have no norm.

        In float32 the squares of large finite elements overflow. These norms are computed again in
        float64, so that a finite tensor does not count as non-finite. Synchronizes.
        """
        norms: list[float] = sample.norms.tolist()
        overflowed = [number for number, norm in enumerate(norms) if norm == math.inf]
        if overflowed:
            tensors = list(dict(self._tensors(optimizer)).values())
            shards = local_tensors([tensors[number].detach() for number in overflowed])
            for number, shard in zip(overflowed, shards, strict=True):
                norms[number] = as_real(shard).double().norm().item()
        return norms

    def _tensors(self, optimizer: Any) -> Iterator[tuple[tuple[str, str], Tensor]]:
        weights = trainable(self._network)
        for name, weight in weights.items():
            yield (WEIGHT, name), weight
        for name, buffer in unwrapped_network(self._network).named_buffers():
            if buffer.is_floating_point():
                yield (BUFFER, plain_name(name)), buffer
        inner = unwrapped_optimizer(optimizer)
        if not isinstance(inner, Optimizer):
            return
        states = {name: inner.state.get(weight, {}) for name, weight in weights.items()}
        for kind in dict.fromkeys(kind for state in states.values() for kind in state):
            for name, state in states.items():
                tensor = state.get(kind)
                if isinstance(tensor, Tensor) and tensor.shape == weights[name].shape:
                    yield (kind, name), tensor

    def _floors(self, taken: StateSample, before: StateSample) -> Tensor:
        """Return the smallest norm as which each tensor is judged, shape ``(K,)``.

        It is a share of the size that is typical of its kind in the sample before.
        """
        typical = _typical(taken) | _typical(before)
        floors = [typical[kind] for kind, _ in taken.tensors]
        return torch.stack(floors) * self._layout(taken).roots if floors else taken.norms

    def _num_bad(self, taken: StateSample, before: StateSample) -> Tensor:
        is_buffer = self._layout(taken).is_buffer
        bad = torch.where(is_buffer, taken.norms.isnan(), ~taken.norms.isfinite())
        if taken.tensors == before.tensors:
            bad &= before.norms.isfinite()
        return bad.sum(dim=0, keepdim=True).float()

    def _layout(self, sample: StateSample) -> "_Layout":
        if self._last_layout is None or self._last_layout.tensors != sample.tensors:
            roots = torch.tensor([math.sqrt(size) for size in sample.sizes])
            is_buffer = torch.tensor([kind == BUFFER for kind, _ in sample.tensors])
            self._last_layout = _Layout(
                sample.tensors, roots.to(self._device), is_buffer.bool().to(self._device)
            )
        return self._last_layout


class _Layout(NamedTuple):
    """What depends on the tensors of a sample alone."""

    tensors: tuple[tuple[str, str], ...]
    roots: Tensor
    """Square root of each tensor's number of elements, shape ``(K,)``, float32."""

    is_buffer: Tensor
    """Whether a tensor is a buffer. It may hold infinities on purpose: a mask, or the range that an
    observer begins with. Shape ``(K,)``, bool."""


def _typical(sample: StateSample) -> dict[str, Tensor]:
    """Return the smallest root mean square as which tensors are judged, shape ``()``, by kind."""
    squares = sample.norms.nan_to_num(posinf=0.0).double().square()
    found, first = {}, 0
    for kind, number in Counter(kind for kind, _ in sample.tensors).items():
        last = first + number
        mean = squares[first:last].sum() / max(sum(sample.sizes[first:last]), 1)
        found[kind] = _FLOORS.get(kind, _FLOOR) * mean.sqrt().float()
        first = last
    return found


def _growth(weight: StateNorm, size: int) -> float:
    """Return by how much the root mean square of a weight has grown; infinite if it is NaN."""
    growth = weight.norm - weight.norm_before
    return math.inf if math.isnan(growth) else growth / math.sqrt(max(size, 1))


def _why_undivided(moments: Mapping[str, Tensor], epsilon: float) -> str | None:
    """Tell why Adam divides the update of a weight by zero, in a clause; synchronizes."""
    second = moments["exp_avg_sq"]
    if torch.tensor(epsilon, dtype=second.dtype).item() == 0:
        return f"eps={epsilon:g} is zero in {str(second.dtype).removeprefix('torch.')}"
    shards = local_tensors([moments["exp_avg"], second])
    has_first, has_second = (bool(shard.any()) for shard in shards)
    if has_first and not has_second:
        return f"all second moments are zero, and eps is {epsilon:g}"
    return None
