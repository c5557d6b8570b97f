"""Settings that an optimizer or a schedule refuses are refused before the training."""

import pytest

from support.recipe_texts import message, parsed


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer={type: AdamW, betas: [0.9, 2]}", "optimizer.betas: expected a number < 1, got"),
        ("optimizer={type: AdamW, beta1: 1}", "optimizer.beta1: expected a number < 1, got 1"),
        ("optimizer={type: AdamW, eps: .nan}", "optimizer.eps: expected a number >= 0, got nan"),
        ("optimizer={type: AdamW, eps: .inf}", "optimizer.eps: expected a number <= "),
        ("training.learning_rate=.inf", "training.learning_rate: expected a number <= "),
        ("training.label_smoothing_factor=.nan", "expected a number that is not nan"),
        ("training.optim=no_such_optimizer", "training.optim: "),
        ("training.optim=lomo", "training.optim: must be an optimizer that changes its weights af"),
        (
            "training={optim: galore_adamw_layerwise, optim_target_modules: all-linear}",
            "training.optim: must be an optimizer that changes its weights after backward",
        ),
        ("training.optim_args=rank", "training.optim_args: invalid: not enough values to unpack"),
        ("training.num_train_epochs=1e300", "training.num_train_epochs: expected a number <= "),
        (
            "training={lr_scheduler_type: polynomial, lr_scheduler_kwargs: {power: x}}",
            "training",
        ),
        ("training={lr_scheduler_type: warmup_stable_decay}", "num_decay_steps"),
        ("training={lr_scheduler_type: cosine, lr_scheduler_kwargs: {cycles: 2}}", "cycles"),
        ("training={lr_scheduler_type: linear, warmup_steps: .inf}", "training.warmup_steps"),
        (
            "training={lr_scheduler_type: inverse_sqrt, lr_scheduler_kwargs: {timescale: .nan}}",
            "must give a finite learning rate at each step, got the factor nan at step",
        ),
    ],
)
def test_wrong_settings(override, says):
    """A wrong setting of the optimizer or the schedule is an error of one line."""
    assert says in message(override)


def test_settings_that_are_right():
    """A schedule of transformers and one of MindFormers are accepted."""
    of_transformers = parsed(
        training={"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0}}
    )
    of_mindformers = parsed(
        lr_schedule={"type": "CosineWithWarmUpLR", "lr_end": 1e-3, "warmup_steps": 2}
    )

    assert of_transformers.arguments.lr_scheduler_kwargs == {"min_lr": 0}
    assert of_mindformers.schedule.kind.__name__ == "CosineWithWarmUpLR"
