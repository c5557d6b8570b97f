"""The kinds of healthy trainings: how each is run, and what shows that it is healthy."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.healthy import (
    contrasts,
    generators,
    optimization,
    precision,
    regularization,
    rewards,
    rows,
    sequences,
    tasks,
    transfer,
)
from support.healthy.training import Training
from support.healthy.ways import Settings, run

__all__ = ["KINDS", "NUM_STEPS", "Health", "Kind", "health", "train"]

NUM_STEPS = 400
"""Steps of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of healthy training."""

    make: Callable[[int, int], Training]
    """Makes the training from a seed and its number of steps."""

    way: str
    goal: float
    """A run is healthy if its error at the end is at most this share of that at the start."""

    max_norm: float | None = None
    resumes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Errors of a run that no monitor has followed."""

    first: float
    last: float
    losses: list[float]
    """Loss of each update of each part."""


KINDS = {
    # Rewards and preferences
    "sparse rewards": Kind(make=rewards.sparse_rewards, way="plain", goal=0.6),
    "old batches": Kind(make=rewards.old_batches, way="events", goal=0.3, max_norm=0.5),
    "actor and critic": Kind(make=rewards.actor_and_critic, way="attach", goal=0.1, max_norm=0.5),
    "target network": Kind(make=rewards.target_network, way="loop", goal=0.4),
    "preference pairs": Kind(make=rewards.preference_pairs, way="trainer", goal=0.1, max_norm=1.0),
    "group advantages": Kind(make=rewards.group_advantages, way="events", goal=0.6, max_norm=1.0),
    # Tasks
    "alternating tasks": Kind(make=tasks.alternating_tasks, way="plain", goal=0.5),
    "scheduled weights": Kind(make=tasks.scheduled_weights, way="events", goal=0.1),
    "harder tasks": Kind(make=tasks.harder_tasks, way="loop", goal=0.2),
    "longer sequences": Kind(make=tasks.longer_sequences, way="trainer", goal=0.5, max_norm=1.0),
    "repeated lessons": Kind(make=tasks.repeated_lessons, way="loop", goal=0.3),
    "more classes": Kind(make=tasks.more_classes, way="attach", goal=0.3),
    "differential equation": Kind(make=tasks.differential_equation, way="plain", goal=0.1),
    "colder answers": Kind(make=tasks.colder_answers, way="trainer", goal=0.05),
    "masked words": Kind(make=tasks.masked_words, way="events", goal=0.5, max_norm=1.0),
    "matched sets": Kind(make=tasks.matched_sets, way="events", goal=0.6, max_norm=0.1),
    "segmented images": Kind(make=tasks.segmented_images, way="attach", goal=0.4, max_norm=12.0),
    "forecasts": Kind(make=tasks.forecasts, way="trainer", goal=0.5, max_norm=1.0),
    # Pairs of views
    "image and text": Kind(make=contrasts.image_and_text, way="events", goal=0.2, max_norm=1.0),
    "averaged teacher": Kind(make=contrasts.averaged_teacher, way="plain", goal=0.1),
    "queue of keys": Kind(make=contrasts.queue_of_keys, way="loop", goal=0.3),
    # Generators
    "two players": Kind(make=generators.two_players, way="plain", goal=0.4),
    "clipped critic": Kind(make=generators.clipped_critic, way="events", goal=0.6),
    "annealed divergence": Kind(make=generators.annealed_divergence, way="loop", goal=0.3),
    "noise levels": Kind(make=generators.noise_levels, way="attach", goal=0.55),
    "restarted codes": Kind(make=generators.restarted_codes, way="plain", goal=0.5),
    "late judge": Kind(make=generators.late_judge, way="events", goal=0.05),
    "thin densities": Kind(make=generators.thin_densities, way="events", goal=0.4, max_norm=1.0),
    # Sequences
    "recurrent language": Kind(
        make=sequences.recurrent_language, way="trainer", goal=0.5, max_norm=1.0
    ),
    "alignments": Kind(make=sequences.alignments, way="plain", goal=0.1, max_norm=1.0),
    "smoothed labels": Kind(make=sequences.smoothed_labels, way="events", goal=0.55, max_norm=1.0),
    "new experts": Kind(make=sequences.new_experts, way="events", goal=0.45, max_norm=1.0),
    "balanced experts": Kind(make=sequences.balanced_experts, way="trainer", goal=0.45),
    "rare tokens": Kind(make=sequences.rare_tokens, way="trainer", goal=0.5, max_norm=1.0),
    # Weights that are not trained, or not always
    "low-rank embeddings": Kind(make=transfer.low_rank_embeddings, way="attach", goal=0.4),
    "gradual unfreezing": Kind(make=transfer.gradual_unfreezing, way="plain", goal=0.4),
    "frozen midway": Kind(make=transfer.frozen_midway, way="plain", goal=0.2),
    "resumed midway": Kind(make=transfer.resumed_midway, way="attach", goal=0.2, resumes=True),
    "answers only": Kind(make=transfer.answers_only, way="events", goal=0.25, max_norm=1.0),
    "ranked answers": Kind(make=transfer.ranked_answers, way="attach", goal=0.4, max_norm=1.0),
    # Schedules and optimizers
    "warm restarts": Kind(make=optimization.warm_restarts, way="events", goal=0.45, max_norm=1.0),
    "one cycle": Kind(make=optimization.one_cycle, way="loop", goal=0.45, max_norm=1.0),
    "rate to zero": Kind(make=optimization.rate_to_zero, way="trainer", goal=0.45, max_norm=1.0),
    "more micro-batches": Kind(make=optimization.more_micro_batches, way="plain", goal=0.2),
    "momentum": Kind(make=optimization.momentum, way="loop", goal=0.1),
    "factored moments": Kind(make=optimization.factored_moments, way="events", goal=0.45),
    "signs of momentum": Kind(make=optimization.signs_of_momentum, way="plain", goal=0.5),
    "orthogonal updates": Kind(
        make=optimization.orthogonal_updates, way="events", goal=0.45, max_norm=1.0
    ),
    # Rows
    "unequal rows": Kind(make=rows.unequal_rows, way="attach", goal=0.5, max_norm=1.0),
    "heavy tails": Kind(make=rows.heavy_tails, way="events", goal=0.1, max_norm=10.0),
    "outlier rows": Kind(make=rows.outlier_rows, way="loop", goal=0.1, max_norm=1.0),
    "class order": Kind(make=rows.class_order, way="plain", goal=0.25),
    "small data": Kind(make=rows.small_data, way="trainer", goal=0.15, max_norm=1.0),
    "rare positives": Kind(make=rows.rare_positives, way="events", goal=0.1),
    "mixed sources": Kind(make=rows.mixed_sources, way="events", goal=0.3, max_norm=1.0),
    "known facts": Kind(make=rows.known_facts, way="events", goal=0.1),
    # Noise, constraints, and losses that end at zero
    "solved margins": Kind(make=regularization.solved_margins, way="loop", goal=0.01),
    "dropout": Kind(make=regularization.dropout, way="trainer", goal=0.25),
    "small normalized batches": Kind(
        make=regularization.small_normalized_batches, way="loop", goal=0.35
    ),
    "constrained weights": Kind(make=regularization.constrained_weights, way="loop", goal=0.25),
    "skipped layers": Kind(make=regularization.skipped_layers, way="attach", goal=0.3),
    "mixed images": Kind(make=regularization.mixed_images, way="attach", goal=0.1, max_norm=5.0),
    # Precision and averages
    "bfloat16 weights": Kind(make=precision.bfloat16_weights, way="loop", goal=0.45, max_norm=1.0),
    "growing loss scale": Kind(make=precision.growing_loss_scale, way="events", goal=0.2),
    "averages swapped in": Kind(make=precision.averages_swapped_in, way="loop", goal=0.2),
}


def _settings(kind: Kind, num_steps: int) -> Settings:
    return Settings(way=kind.way, num_steps=num_steps, max_norm=kind.max_norm, resumes=kind.resumes)


def train(name: str, seed: int, folder: Path, num_steps: int = NUM_STEPS) -> list[float]:
    """Run a training under the monitor, and return the loss of each update of each part."""
    kind = KINDS[name]
    return run(kind.make, _settings(kind, num_steps), seed, folder=folder)[1]


def health(name: str, seed: int, num_steps: int = NUM_STEPS) -> Health:
    """Run a training without the monitor, and measure its error before and after it."""
    kind = KINDS[name]

    def measured(seed: int, num_steps: int) -> Training:
        training = kind.make(seed, num_steps)
        firsts.append(training.error())
        return training

    firsts: list[float] = []
    training, losses = run(measured, _settings(kind, num_steps), seed)
    return Health(first=firsts[0], last=training.error(), losses=losses)
