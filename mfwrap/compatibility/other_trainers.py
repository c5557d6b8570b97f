"""What Trainers of other libraries keep during a training, without saving it; and their rewards.

Importing this module imports none of these libraries. tests/unit/trainer/test_other_trainers.py
trains with each of their Trainers, and fails if a Trainer changes an attribute that is listed
neither here nor there.
"""

from collections.abc import Iterable
from typing import Any

KEPT = {
    "trl": (
        # Numbers in the log: counts since the start, and values since the last log.
        "_total_train_tokens",
        "_metrics",
        "_stored_metrics",
        "_diagnostic_counters",
        "_pending_metrics",
        "stats",
        "_matched_step_eq",
        "_matched_sum",
        "_off_policy_loss_total",
        "_off_policy_step_equiv",
        "_on_policy_loss_total",
        "_on_policy_step_equiv",
        "_unmatched_step_eq",
        "_unmatched_sum",
        # Texts in the log.
        "_logs",
        "_pending_extra_logs",
        "_textual_logs",
    ),
    "sentence_transformers": ("accum_loss_components",),
}
"""Attributes by library that any rank can continue with."""

OF_RANK = {
    "trl": (
        # Completions that several updates train on, and the place in them.
        "_step",
        "_buffer_step",
        "_buffered_inputs",
        "_buffered_on_policy",
        "_buffered_on_policy_flags",
        "_buffered_text_logs",
    ),
}
"""Attributes by library that only the same rank of the same number of ranks can continue with."""


def kept_attributes(trainer: Any, *, of_rank: bool = True) -> list[str]:
    """Return the attributes that a Trainer changes during a training and that a resume needs.

    What belongs to the process is left out, such as TRL's note of the weights that vLLM has.

    Args:
        trainer: The trainer.
        of_rank: Whether to include attributes that only the same rank of the same number of ranks
            can continue with.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    lists = (KEPT, OF_RANK) if of_rank else (KEPT,)
    found = [names for each in lists for library, names in each.items() if library in libraries]
    return [name for names in found for name in names if name in vars(trainer)]


def synchronized_models(callbacks: Iterable[Any]) -> list[Any]:
    """Return the models that TRL's callbacks move toward the trained model, such as a reference.

    Args:
        callbacks: Callbacks of a trainer.
    """
    return [
        callback.ref_model
        for callback in callbacks
        if any(
            kind.__name__ == "SyncRefModelCallback" and kind.__module__.startswith("trl.")
            for kind in type(callback).__mro__
        )
        and callback.ref_model is not None
    ]


class ExactRewards:
    """Have TRL's ``GRPOTrainer`` compare the rewards of answers in float64.

    In float32, equal rewards differ from their mean: eight times 0.3 by 3e-8, which TRL neither
    counts in ``frac_reward_zero_std`` nor leaves out of the gradient.
    """

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        rewards: Any = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]  # (of TRL)
        return rewards.double()

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]  # (TRL)
        return made | {"advantages": made["advantages"].float()}
