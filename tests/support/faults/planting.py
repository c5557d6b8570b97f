"""Plant a fault in the state of a training, in its settings and in its micro-batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from support.faults.architecture import NUM_CLASSES, VOCABULARY, Architecture
from support.faults.changes import changed, changed_in_place
from support.faults.faults import (
    DATA,
    FLOWING,
    HYPERPARAMETERS,
    LOSSES,
    MOMENTS,
    NETWORK_PARTS,
    NETWORK_SETTINGS,
    Course,
    Fault,
    How,
    Moment,
    What,
)
from support.faults.networks import PlantedNetwork, group_of, new_network, target_weights
from support.faults.updates import KeptGradients, PlantedUpdates

__all__ = ["Planting", "plant_in_batch"]

_KEPT_GRADIENTS = (What.GRADIENT, How.KEPT)
_OF_OTHER_RUN = {How.ANEW, How.MIXED}
_FROM_ELSEWHERE = {How.STALE, How.SWAPPED, *_OF_OTHER_RUN}
"""What takes new values from others, not from those of the same tensor."""

_OTHER_SEED = 1_000
"""What the seed of the other run is higher by."""


def plant_in_batch(
    batch: dict[str, Tensor],
    fault: Fault,
    architecture: Architecture,
    step: int,
    older: Callable[[], dict[str, Tensor]],
) -> None:
    """Plant a fault in a micro-batch that has it: mark its rows, or change its data.

    Args:
        batch: Collated micro-batch, changed in place.
        fault: Fault.
        architecture: Architecture of the network.
        step: Number of the step.
        older: Returns the same micro-batch of some steps before.
    """
    rows = slice(None) if fault.row is None else slice(fault.row, fault.row + 1)
    if fault.kind.what in FLOWING | LOSSES - {What.OUTER_LOSS}:
        batch["marks"][rows] = step - fault.step + 1
    if fault.kind.what is What.VOCABULARY:
        generator = torch.Generator().manual_seed(fault.pick)
        others = torch.randperm(VOCABULARY, generator=generator)
        for name in (architecture.inputs, "labels"):
            batch[name][rows] = others[batch[name][rows]]
    elif fault.kind.what is What.SEQUENCE:
        for name in (architecture.inputs, "labels"):
            batch[name][rows] = _other_sequence(batch[name][rows], fault)
    elif fault.kind.what in DATA - {What.BATCH}:
        names = {What.INPUTS: architecture.inputs, What.PADDING_MASK: "attention_mask"}
        name = names.get(fault.kind.what, "labels")
        if fault.kind.how is How.STALE:
            batch[name][rows] = older()[name][rows]
        else:
            batch[name][rows] = _spoilt(batch[name][rows], fault)


def _spoilt(entry: Tensor, fault: Fault) -> Tensor:
    how, is_number = fault.kind.how, entry.is_floating_point()
    if how is How.MISSING:
        return torch.full_like(entry, -100)
    if how is How.CONSTANT:
        new = torch.ones_like(entry)
        # Padding stays padding.
        return new if is_number else torch.where(entry < 0, entry, new)
    if how is How.NOISE and not is_number:
        generator = torch.Generator().manual_seed(fault.pick)
        return torch.randint(int(entry.max()) + 1, entry.shape, generator=generator)
    if fault.kind.what is What.TARGETS and how in {How.SHIFTED, How.TRUNCATED}:
        return _other_targets(entry, fault)
    if how in {How.NAN, How.INFINITE}:
        new, place = entry.clone(), fault.pick % entry[0].numel()
        one = new.view(len(new), -1)[:, place]
        one.copy_(changed(one, fault, fault.size))
        return new
    return changed(entry, fault, fault.size).clone()


def _other_sequence(tokens: Tensor, fault: Fault) -> Tensor:
    """Return each token twice, or the first half in front of padding that counts."""
    if fault.kind.how is How.REPEATED:
        return tokens.repeat_interleave(2, -1)[..., : tokens.shape[-1]].clone()
    return changed(tokens, fault, fault.size)


def _other_targets(targets: Tensor, fault: Fault) -> Tensor:
    """Return half of the targets, those of the token before or behind, or classes from one on."""
    if fault.kind.how is How.TRUNCATED:
        place = torch.arange(targets.shape[-1])
        return targets.masked_fill(place >= targets.shape[-1] // 2, -100)
    if targets.dim() > 1:
        return targets.roll(1 if fault.pick % 2 == 0 else -1, -1)
    return (targets + 1) % NUM_CLASSES


class Planting:
    """Change weights, states and settings of a training when the step of the fault comes.

    Args:
        architecture: Architecture of the network.
        network: Network without wrappers.
        optimizer: Optimizer.
        fault: Fault, which is on this rank; ``None`` for none.
        seed: Seed of the weights of the run.
        width: Hidden size of the network.
    """

    def __init__(
        self,
        architecture: Architecture,
        network: nn.Module,
        optimizer: Optimizer,
        fault: Fault | None,
        *,
        seed: int,
        width: int,
    ) -> None:
        self._architecture, self._network, self._optimizer = architecture, network, optimizer
        self._fault, self._seed, self._width = fault, seed, width
        self._planted = PlantedNetwork(network, architecture, fault)
        self._past: list[dict[str, Tensor]] = []
        self._groups: list[tuple[dict[str, Any], str, Any]] = []
        self._step = 0
        self._updates: PlantedUpdates | None = None
        self._gradients: KeptGradients | None = None
        optimizer.register_step_pre_hook(lambda *_: self._at(Moment.BETWEEN))
        if fault is not None and fault.kind.what is What.UPDATE:
            self._updates = PlantedUpdates(
                optimizer, list(target_weights(network, architecture, fault).values()), fault
            )
        elif fault is not None and (fault.kind.what, fault.kind.how) == _KEPT_GRADIENTS:
            self._gradients = KeptGradients(network, optimizer)

    def begin_step(self, step: int) -> None:
        """Do what the fault does before the forward of a step, or remove it after its last one."""
        self._step = step
        fault = self._fault
        if fault is None:
            return
        if fault.kind.how in {How.STALE, How.AVERAGED}:
            weights = self._network.state_dict()
            self._past.append({name: tensor.clone() for name, tensor in weights.items()})
            self._past = self._past[-fault.lag - 1 :]
        is_everywhere = fault.micro_batch is None and fault.row is None
        if is_everywhere and fault.kind.course is not Course.BRIEF and fault.is_at(step):
            self._planted.step_of_program = step - fault.step + 1
        if self._updates is not None:
            self._updates.is_on = fault.is_at(step)
        if self._gradients is not None:
            self._gradients.begin_step(is_on=fault.is_at(step))
        if not fault.is_at(step):
            self.close()
        elif step == fault.step:
            self._set(fault)
        self._at(Moment.BEFORE)

    def end_step(self) -> None:
        """Do what the fault does between the update and the end of the step."""
        self._at(Moment.AFTER)

    def close(self) -> None:
        """Remove the fault, unless it has changed what is kept in memory."""
        self._planted.restore()
        while self._groups:
            group, name, value = self._groups.pop()
            group[name] = value

    def _set(self, fault: Fault) -> None:
        if fault.kind.what in NETWORK_SETTINGS | NETWORK_PARTS:
            self._planted.change_setting(fault)
        if fault.kind.what is What.GROUP_WEIGHT_DECAY:
            group = self._optimizer.param_groups[group_of(self._architecture, fault)]
            self._groups.append((group, "weight_decay", group["weight_decay"]))
            group["weight_decay"] *= fault.size
        if fault.kind.what in HYPERPARAMETERS:
            name = HYPERPARAMETERS[fault.kind.what]
            for group in self._optimizer.param_groups:
                self._groups.append((group, name, group[name]))
                group[name] = _changed_hyperparameter(group[name], fault)

    def _at(self, moment: Moment) -> None:
        fault = self._fault
        if fault is None or moment is not fault.moment:
            return
        is_due = self._step == fault.step
        if fault.kind.course is not Course.BRIEF:
            is_due = fault.is_at(self._step)
        if not is_due:
            return
        self._change(fault)

    def _change(self, fault: Fault) -> None:
        # A weight that grows has been multiplied in the steps before.
        for tensor in self._tensors(fault):
            changed_in_place(tensor, fault, fault.size)
        is_of_other_run = fault.kind.what is What.WEIGHT and fault.kind.how in _OF_OTHER_RUN
        if fault.kind.what is What.ALL_WEIGHTS or is_of_other_run:
            self._load(fault)
        elif fault.kind.how is How.SWAPPED and fault.kind.what not in HYPERPARAMETERS:
            self._swap(fault)
        elif fault.kind.what is What.OPTIMIZER_STATE:
            self._optimizer.state.clear()
        elif fault.kind.how is How.STALE and fault.kind.what is What.WEIGHT:
            self._go_back(fault)
        elif fault.kind.how is How.ROUNDED:
            with torch.no_grad():
                for weight in target_weights(self._network, self._architecture, fault).values():
                    weight.copy_(weight.bfloat16())

    def _tensors(self, fault: Fault) -> list[Tensor]:
        """Return the tensors in memory that `changed_in_place` changes."""
        what = fault.kind.what
        if fault.kind.how in _FROM_ELSEWHERE:
            return []
        if what is What.FREQUENCIES:
            return [self._network.get_buffer(self._architecture.frequencies or "")]
        if what is What.BUFFER:
            layers = self._architecture.layers
            name = f"{layers[(fault.layer or 0) % len(layers)]}.{self._architecture.buffer}"
            return [self._network.get_buffer(name)]
        if what not in {What.WEIGHT, What.FROZEN_WEIGHT, *MOMENTS}:
            return []
        return self._kept(fault)

    def _kept(self, fault: Fault) -> list[Tensor]:
        """Return the weights, gradients or states that a fault is in."""
        what = fault.kind.what
        weights = list(target_weights(self._network, self._architecture, fault).values())
        if what in {What.WEIGHT, What.FROZEN_WEIGHT}:
            return [weight.data for weight in weights]
        if what is What.GRADIENT:
            return [
                torch.zeros_like(weight) if weight.grad is None else weight.grad
                for weight in weights
            ]
        states = [self._optimizer.state.get(weight, {}) for weight in weights]
        return [state[name] for state in states for name in MOMENTS[what] if name in state]

    def _swap(self, fault: Fault) -> None:
        if fault.kind.what is What.OPTIMIZER_STATE:
            keys = list(target_weights(self._network, self._architecture, fault).values())
            state = self._optimizer.state
            for one, other in zip(keys[::2], keys[1::2], strict=True):
                state[one], state[other] = state[other], state[one]
            return
        weights = self._kept(fault)
        for first, second in zip(weights[::2], weights[1::2], strict=True):
            old = first.clone()
            first.copy_(second)
            second.copy_(old)

    def _load(self, fault: Fault) -> None:
        if fault.kind.how is How.AVERAGED:
            states = [*self._past, self._network.state_dict()]
            new = {
                name: torch.stack([each[name].float() for each in states]).mean(0)
                for name in states[0]
                if states[0][name].is_floating_point()
            }
        else:
            seed = self._seed + _OTHER_SEED
            with torch.random.fork_rng():
                new = new_network(self._architecture, width=self._width, seed=seed).state_dict()
        weights = dict(self._network.named_parameters())
        if fault.kind.what is What.WEIGHT:
            weights = target_weights(self._network, self._architecture, fault)
        with torch.no_grad():
            for name, weight in weights.items():
                is_mixed = fault.kind.how is How.MIXED
                weight.copy_((weight + new[name]) / 2 if is_mixed else new[name])

    def _go_back(self, fault: Fault) -> None:
        weights = target_weights(self._network, self._architecture, fault)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self._past[0][name])
        if fault.kind.course is Course.LASTING:
            # Frozen: each later step goes back to the same value.
            self._past = [self._past[0]] * (fault.lag + 2)


def _changed_hyperparameter(value: Any, fault: Fault) -> Any:
    if isinstance(value, tuple):
        if fault.kind.how is How.SWAPPED:
            return value[::-1]
        if fault.kind.how is How.RAISED:
            return tuple(1 - (1 - beta) / fault.size for beta in value)
        return tuple(beta / fault.size for beta in value)
    if fault.kind.what is What.MOMENTUM and fault.kind.how is How.RAISED:
        return 1 - (1 - value) / fault.size
    return 0.0 if fault.kind.how is How.ZERO else value * fault.size
