"""Settings of the step as a Trainer's loop needs them."""

import dataclasses

from transformers import TrainingArguments

from mfwrap.config import StepConfig

__all__ = ["loop_settings"]


def loop_settings(config: StepConfig, args: TrainingArguments) -> StepConfig:
    """Return the settings of the step without what the Trainer does by itself.

    Raises:
        ValueError: If a setting contradicts `args`.
    """
    if config.calculate_per_token_loss:
        msg = (
            "`calculate_per_token_loss` must be False in a Trainer, which divides by the number "
            "of tokens by itself, got True"
        )
        raise ValueError(msg)
    steps = args.gradient_accumulation_steps
    if config.gradient_accumulation_steps not in (1, steps):
        msg = (
            f"`gradient_accumulation_steps` must be the {steps} of `args`, or left at 1, got "
            f"{config.gradient_accumulation_steps}"
        )
        raise ValueError(msg)
    default = StepConfig().max_grad_norm
    if config.max_grad_norm not in (default, args.max_grad_norm):
        msg = (
            f"`max_grad_norm` must be the {args.max_grad_norm} of `args`, or left at {default}, "
            f"got {config.max_grad_norm}"
        )
        raise ValueError(msg)
    # The Trainer accumulates and clips; the accelerator hears of neither.
    return dataclasses.replace(config, gradient_accumulation_steps=1)
