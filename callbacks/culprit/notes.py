"""Note what should not be so in any run, once, beside the anomalies."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.callbacks.culprit.causes.evidence import Cause
from mfwrap.callbacks.culprit.judges.judges import Judges
from mfwrap.callbacks.culprit.judges.settings import listed
from mfwrap.callbacks.culprit.judges.step import EXPERT, JudgedStep, StepScores
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.collectives import this_rank
from mfwrap.compatibility.torch import BatchNorm
from mfwrap.tensors.wrappers import trainable, unwrapped_network, unwrapped_optimizer

_FEWEST_ALIKE = 3
"""Smallest number of weights of the same role and shape that are compared."""

_ODD_SIZE = 8.0
"""Smallest ratio of the size of a weight to that of the others that is odd. In trained Transformers
it is below 2, and up to 4 if the initialization depends on the depth."""

_ODD_LOSS = 3.0
"""Smallest ratio of the first loss, less one, to the loss of guessing that is odd."""

_WORSE = 0.1
"""Smallest distance of the first loss of a loaded language model above that of guessing that is
odd. A model that was saved before any training is about at that of guessing."""

_ZERO_STEPS = 3
"""Number of updates in a row with a learning rate of zero, or that change nothing, that are odd: a
warm-up begins with one, and a schedule may end with another."""

_QUIET = 3
"""Number of steps in a row without gradients at their begin before one with them is odd. A loop may
set them to zero in place."""

_UPDATES = 10
"""Number of updates after which each trained weight must have had a gradient, and in a row without
any gradient that are odd."""

_RECENT = 3
"""Number of steps in which a change of weights may show."""

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForTokenClassification")
"""Ends of the names of transformers' classes whose loss is a cross-entropy over a vocabulary, or
over classes."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that should not be so in any run. It may be meant, and need not do any harm."""

    step: int
    rank: int
    cause: Cause
    """What was seen, and what to look at."""

    def as_record(self) -> dict[str, Any]:
        """Return the known fields, ready for JSON; the kind is ``"note"``."""
        cause = self.cause
        words = {"cause": cause.name, "explanation": cause.explanation}
        name = {"name": cause.tensors[0]} if cause.tensors else {}
        known = {"step": self.step, "kind": "note", "ranks": [self.rank], **words}
        return {**known, "suggestion": cause.suggestion, **name}

    def __str__(self) -> str:
        """Say the note in one line."""
        return f"step {self.step}: note: {self.cause.explanation}; {self.cause.suggestion}"


@final
class RunNotes:
    """Compare a run with what is so in any run, and say once what is not.

    Before the first step, sizes of weights of the same role and shape. In the first step, the mode
    of the network, and its loss beside that of guessing. After ten updates, weights without a
    gradient. In all steps, settings that change, weights that change between two steps, a
    learning rate of zero, updates that change nothing, gradients that were not set to zero or that
    are all zero, and a cross-entropy below zero.

    Args:
        network: Network with or without wrappers; ``None`` if unknown.
        judges: Judges of the steps.
        step: Finished steps. What is compared at the start of a run is left out unless it is 0.
        recorder: Recorder of the steps; ``None`` without a replay.
    """

    def __init__(
        self,
        network: nn.Module | None,
        judges: Judges,
        step: int = 0,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._judges, self._recorder = judges, recorder
        self._said: set[str] = set()
        self._changed: tuple[int, tuple[str, ...]] = (-_RECENT, ())
        self._num_without = self._num_zero_rates = self._num_still = self._num_updates = 0
        self._num_dead = 0
        self._is_first = step == 0 and network is not None
        self._network = None if network is None else unwrapped_network(network)
        self._num_classes = 0 if self._network is None else _num_classes(self._network)
        self._odd_weight: tuple[str, str] | None = None
        if judges.states is not None and self._is_first and self._network is not None:
            weights, norms = trainable(self._network), judges.states.weight_norms()
            self._odd_weight = _odd_weight(weights, norms)

    def of_step(
        self, numbers: StepNumbers, judgement: JudgedStep, scores: StepScores
    ) -> list[Note]:
        """Return the notes of a step, each of which is returned once in a run.

        Call it once for each step. Synchronizes with the device only if weights have changed
        between two steps, or have not changed in several updates.

        Args:
            numbers: Numbers of the step, on the host.
            judgement: What the judges found in the step.
            scores: Its summary, on the host.
        """
        found = [*self._of_first(numbers), *self._of_any(numbers, judgement, scores)]
        new = [one for one in found if one.explanation not in self._said]
        self._said.update(one.explanation for one in new)
        return [Note(numbers.step, this_rank(), one) for one in new]

    def changed_weights(
        self, step: int, num_steps: int = _RECENT
    ) -> tuple[int, tuple[str, ...]] | None:
        """Return the weights that have changed between two of the last steps, and when.

        Args:
            step: Step that may be a consequence.
            num_steps: Number of steps in which the change must have been.

        Returns:
            The later one of the two steps, and names; ``None`` if no weight has changed.
        """
        changed, names = self._changed
        return (changed, names) if step - changed <= num_steps and names else None

    def _of_first(self, numbers: StepNumbers) -> list[Cause]:
        network, is_first, self._is_first = self._network, self._is_first, False
        if not is_first or network is None:
            return []
        notes = []
        if self._odd_weight is not None:
            name, said = self._odd_weight
            look = "look at its initialization, or at what has loaded it"
            notes.append(Cause("weight_size", said, look, tensors=(name,)))
        if self._judges.settings.began_in_evaluation and _depends_on_mode(network):
            said = "the network is in evaluation mode, and it has modules that behave otherwise "
            said += "in training"
            notes.append(Cause("setting", said, "call `train()` before the first step"))
        number = self._num_classes
        guess = math.log(number) if number > 1 else math.inf
        if numbers.loss - 1 > _ODD_LOSS * guess:
            said = f"the first loss is {numbers.loss:.4g}, and {guess:.4g} if all {number} classes "
            said += "were alike"
            look = "look at the initialization of the head, whether the loss is a sum, and at the "
            look += "rows of this step"
            notes.append(Cause("first_loss", said, look))
        elif numbers.loss > guess + _WORSE and _is_loaded(network):
            said = f"the first loss is {numbers.loss:.4g}, worse than the {guess:.4g} of guessing "
            said += f"among all {number} tokens, though the weights were loaded"
            look = "look whether the tokenizer is the model's own, whether the loss is a sum, and "
            look += "at the rows of this step, unless the model has never seen such texts"
            notes.append(Cause("first_loss", said, look))
        return notes

    def _of_any(
        self, numbers: StepNumbers, judgement: JudgedStep, scores: StepScores
    ) -> list[Cause]:
        notes = []
        own = [] if self._recorder is None else self._recorder.last_step
        # Another loss of the same network, such as that of a policy, may be negative.
        if numbers.loss < 0 < self._num_classes and any(
            call.loss_gradient is not None for call in own
        ):
            self._num_classes = 0
            said = f"the loss is {numbers.loss:.4g}, and a cross-entropy is never below zero"
            notes.append(Cause("loss", said, "look for a wrong sign, or a term that is subtracted"))
        changes = self._judges.settings.changes(numbers.step, num_steps=1)
        if changes:
            look = "look at what sets it, and whether it was meant"
            notes.append(Cause("setting", listed(changes), look))
        if self._recorder is not None:
            kept = self._recorder.began_with_gradients
            norms = self._recorder.second_gradients
            since_begin = bool(norms) and _has_kept(norms, judgement.optimizer)
            if since_begin or (kept and self._num_without >= _QUIET):
                said = f"step {numbers.step} began with the gradients of the step before"
                look = "look whether they are set to zero after each update"
                notes.append(Cause("gradient", said, look))
            self._num_without = 0 if kept else self._num_without + 1
        if scores.num_changed > 0:
            names = judgement.changed()
            self._changed = (numbers.step, names)
            more = f" and {len(names) - 1} other weights" if len(names) > 1 else ""
            said = f"{names[0]}{more} changed between two steps"
            look = "if no code of yours changes weights, suspect the memory"
            notes.append(Cause("weight_changed", said, look, tensors=names[:1]))
        return notes + self._of_updates(numbers, judgement, scores)

    def _of_updates(
        self, numbers: StepNumbers, judgement: JudgedStep, scores: StepScores
    ) -> list[Cause]:
        """Count updates in a row that are odd."""
        notes = []
        if not (numbers.overflow or numbers.skipped):
            is_zero = scores.learning_rate == 0
            self._num_zero_rates = self._num_zero_rates + 1 if is_zero else 0
            is_still = scores.update_ratio == 0 < scores.learning_rate
            is_dead = numbers.global_norm == 0
            self._num_dead = self._num_dead + 1 if is_dead else 0
            self._num_still = self._num_still + 1 if is_still and not is_dead else 0
            self._num_updates += 1
            if self._num_updates == _UPDATES and self._network is not None:
                notes += _unreached(self._network, judgement.optimizer)
        if self._num_still == _ZERO_STEPS and not _are_mostly_zero(judgement.local_norm):
            said = f"most weights have not changed at all in the last {_ZERO_STEPS} updates, at a "
            said += f"learning rate of {scores.learning_rate:.3g}"
            look = "look whether the optimizer has these weights, and whether their type is too "
            look += "coarse for such updates"
            notes.append(Cause("no_update", said, look))
        if self._num_dead == _UPDATES:
            said = f"all gradients of the last {_UPDATES} updates were zero, so nothing is learned"
            look = "look for a loss that does not depend on the weights, such as rewards that are "
            look += "the same for all answers, or units that are always off; if the weights are "
            look += "ruined, go back to a checkpoint"
            notes.append(Cause("no_gradient", said, look))
        if self._num_zero_rates == _ZERO_STEPS:
            said = f"the learning rate of the last {_ZERO_STEPS} updates was zero"
            look = "look at the schedule: it may have ended before the training"
            notes.append(Cause("learning_rate", said, look))
        return notes


def _are_mostly_zero(norms: Tensor) -> bool:
    """Tell whether most norms are zero; false without norms. Synchronizes with the device."""
    return (norms == 0).float().mean().item() > 1 / 2


def _has_kept(norms: Mapping[Tensor, Tensor], optimizer: Any) -> bool:
    """Tell whether a step has begun with gradients of weights that the optimizer has.

    Synchronizes with the device.
    """
    optimizer = unwrapped_optimizer(optimizer)
    if not isinstance(optimizer, Optimizer):
        return False
    known = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return any(id(weight) in known and norm.item() > 0 for weight, norm in norms.items())


def _unreached(network: nn.Module, optimizer: Any) -> list[Cause]:
    """Return a note of the weights that the optimizer has, and that have had no gradient."""
    optimizer = unwrapped_optimizer(optimizer)
    if not isinstance(optimizer, Optimizer):
        return []
    known = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    # An expert has no gradient until a token is sent to it.
    weights = {
        name: weight
        for name, weight in trainable(network).items()
        if id(weight) in known and EXPERT.search(name) is None
    }
    empty = [name for name, weight in weights.items() if not optimizer.state.get(weight)]
    # Some optimizers have no state.
    if not 0 < len(empty) < len(weights):
        return []
    others = f" and {len(empty) - 1} other trained weights have" if len(empty) > 1 else " has"
    said = f"{empty[0]}{others} had no gradient in {_UPDATES} updates"
    return [Cause("no_gradient", said, "look at what uses them", tensors=(empty[0],))]


def _odd_weight(
    weights: Mapping[str, Tensor], norms: Mapping[str, float]
) -> tuple[str, str] | None:
    """Return a matrix that is far larger or smaller than those of its role in other layers.

    Returns:
        Its name, and a clause about it.
    """
    roles: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    for name, weight in weights.items():
        norm = norms.get(name, 0.0)
        # A matrix of zeros is one on purpose.
        if weight.dim() > 1 and 0 < norm < math.inf:
            role = (re.sub(r"\d+", "#", name), tuple(weight.shape))
            roles.setdefault(role, {})[name] = norm
    ratios = [
        (norm / statistics.median(others), name)
        for alike in roles.values()
        if len(alike) >= _FEWEST_ALIKE
        for name, norm in alike.items()
        for others in [[each for other, each in alike.items() if other != name]]
    ]
    odd = [each for each in ratios if not 1 / _ODD_SIZE < each[0] < _ODD_SIZE]
    if not odd:
        return None
    ratio, name = max(odd, key=lambda each: abs(math.log(each[0])))
    more = f", and {len(odd) - 1} more are odd" if len(odd) > 1 else ""
    said = f"the norm of {name} is {ratio:.3g} times that of the same weight in other layers{more}"
    return name, said


def _depends_on_mode(network: nn.Module) -> bool:
    return any(
        isinstance(module, BatchNorm) or (isinstance(module, _DROPOUTS) and module.p > 0)
        for module in network.modules()
    )


def _is_loaded(network: nn.Module) -> bool:
    """Return whether a language model was loaded, also one inside an adapter."""
    name = getattr(getattr(network, "config", None), "_name_or_path", "")
    return type(network).__name__.endswith(_LANGUAGE) and bool(name)


def _num_classes(network: nn.Module) -> int:
    """Return over how many classes the network's own loss is a cross-entropy; 0 if unknown."""
    config, name = getattr(network, "config", None), type(network).__name__
    if name.endswith(_LANGUAGE):
        found = getattr(config, "vocab_size", 0)
    elif name.endswith(_CLASSES):
        found = getattr(config, "num_labels", 0)
    else:
        found = 0
    return found if type(found) is int else 0
