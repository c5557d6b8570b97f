"""Arguments, state and schedule have PyNative's names; what a Trainer lacks is refused by name."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerState, TrainingArguments, get_scheduler

from mfwrap import schedules
from mfwrap.callbacks.pynative.facts import (
    AbsentValue,
    PyNativeSchedule,
    PyNativeSection,
    pynative_arguments,
    pynative_state,
)
from support.trainer_runs import tiny_llama


def optimizer(**settings):
    """Return an optimizer with two groups, of which one has no decay."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [
        {"params": weights[:1], "weight_decay": 0.0},
        {"params": weights[1:], "weight_decay": 0.3},
    ]
    return torch.optim.AdamW(groups, lr=0.2, betas=(0.8, 0.9), **settings)


def arguments(facts=None, train_batch_size=6, **settings):
    """Return PyNative's arguments of a training."""
    known = {"max_steps": 9, "report_to": "none", "use_cpu": True} | settings
    args = TrainingArguments("unused", **known)
    state = TrainerState(max_steps=9, train_batch_size=train_batch_size)
    return pynative_arguments(args, state, facts or {})


def test_the_sections_of_a_training():
    """The sections have the Trainer's settings."""
    steps = optimizer()
    schedule = schedules.CosineWithWarmUpLR(steps, total_steps=9, warmup_steps=3, lr_end=0.01)
    facts = {"optimizer": steps, "lr_scheduler": schedule, "model": tiny_llama()}
    args = arguments(facts, gradient_accumulation_steps=4, max_grad_norm=2.5, seed=7)

    assert args.training.to_dict() == {
        "steps": 9,
        "local_batch_size": 6,
        "global_batch_size": 24,
        "max_norm": 2.5,
        "seed": 7,
        "deterministic": False,
        "rampup_batch_size": None,
    }
    found = args.optimizer
    assert (found.type, found.betas, found.eps, found.weight_decay) == (
        *("AdamW", [0.8, 0.9], 1e-8, 0.3),
    )
    assert "lr" not in found
    assert args.lr_scheduler.type == "CosineWithWarmUpLR"
    assert args.lr_scheduler.learning_rate == 0.2
    assert args.lr_scheduler.lr_end == 0.01
    assert (args.lr_scheduler.warmup_steps, args.lr_scheduler.total_steps) == (3, 9)
    assert args.model["hidden_size"] == 16
    assert (args.model.model_type, args.model.architectures) == ("llama", "LlamaForCausalLM")
    assert args.parallelism.to_dict() == {
        "data_parallel": 1,
        "tensor_parallel": 1,
        "context_parallel": 1,
        "pipeline_parallel": 1,
    }
    assert args.training_arguments.seed == 7


@pytest.mark.parametrize(
    ("name", "kind"), [("linear", "linear"), ("constant", "constant"), ("cosine", "cosine")]
)
def test_the_trainers_own_schedule(name, kind):
    """A schedule of the Trainer has the name of its setting, and the warm-up."""
    steps = optimizer()
    schedule = get_scheduler(name, steps, num_warmup_steps=3, num_training_steps=9)
    args = arguments(
        {"optimizer": steps, "lr_scheduler": schedule}, lr_scheduler_type=name, warmup_steps=3
    )

    assert (args.lr_scheduler.type, args.lr_scheduler.warmup_steps) == (kind, 3)


def test_a_schedule_of_the_users_own():
    """A schedule of torch has its class's name; one that follows a metric has no initial rates."""
    steps = optimizer()
    for schedule in (
        torch.optim.lr_scheduler.LambdaLR(steps, lambda _: 1.0),
        torch.optim.lr_scheduler.ReduceLROnPlateau(steps),
    ):
        section = arguments({"optimizer": steps, "lr_scheduler": schedule}).lr_scheduler
        assert section.to_dict() == {
            "type": type(schedule).__name__,
            "learning_rate": 0.2,
            "total_steps": 9,
        }


@pytest.mark.parametrize(
    ("read", "instead"),
    [
        (lambda args: args.checkpoint, "`args.checkpoint` is unknown in a Trainer; write `save_"),
        (lambda args: args.get("monitor"), "`args.monitor` .*; write `.*TrainingStateMonitor"),
        (lambda args: args["swap"], "`args.swap` .*, and nothing replaces it: "),
        (lambda args: args.parallelism.expert_parallel, "`args.parallelism.expert_parallel` .*"),
        (lambda args: args.parallelism.get("cpu_offload", False), "`args.parallelism.cpu_off"),
        (lambda args: args.optimizer.get("weight_decay_include"), "write `weight_decay` of the"),
        (lambda args: args.trainning, "`args` has no `trainning`; did you mean 'training'"),
        (lambda args: args.training.stepz, "`args.training` has no `stepz`; did you mean 'steps'"),
    ],
)
def test_what_is_missing_is_refused_by_name(read, instead):
    """What PyNative has and a Trainer has not raises one sentence, also with a default."""
    with pytest.raises((AttributeError, KeyError), match=instead):
        read(arguments())


def test_other_names_have_defaults():
    """A name that PyNative does not know either has the caller's default."""
    args = arguments({"model": nn.Linear(1, 1)})

    assert args.get("run_mode") is None
    assert args.model.get("seq_length", 4096) == 4096
    assert args.model.to_dict() == {"architectures": "Linear"}
    assert not hasattr(args, "checkpoint")
    assert copy.deepcopy(args.training).to_dict() == args.training.to_dict()


def test_a_batch_that_is_split_over_ranks(monkeypatch):
    """With ``split_batches`` the size of a loader's batch is that of all ranks."""
    monkeypatch.setattr("mfwrap.callbacks.shared.progress.num_ranks", lambda: 3)
    split = arguments(accelerator_config={"split_batches": True}).training
    whole = arguments().training

    assert (split.local_batch_size, split.global_batch_size) == (2, 6)
    assert (whole.local_batch_size, whole.global_batch_size) == (6, 18)


def test_the_state():
    """Fields that a Trainer knows can be read and set; any other raises one sentence."""
    args = TrainingArguments(
        "unused", max_steps=9, gradient_accumulation_steps=4, report_to="none", use_cpu=True
    )
    trainer_state = TrainerState(
        max_steps=9, global_step=7, train_batch_size=2, num_train_epochs=3, best_metric=0.5
    )
    state = pynative_state(args, trainer_state, {"train_dataloader": range(12)})
    state.update(trainer_state)
    state.own = 3

    assert (state.epoch_step, state.epoch, state.global_step, state.max_steps) == (3, 2.0, 7, 9)
    assert (state.global_batch_size, state.num_accumulation_steps) == (8, 4)
    assert (state.consumed_samples, state.best_metric, state.own) == (56, 0.5, 3)
    assert (state.eval_steps, state.loss_scale) == (0, None)
    with pytest.raises(AttributeError, match=r"`state.total_flops` is unknown .*MFLossMonitor"):
        _ = state.total_flops
    with pytest.raises(AttributeError, match="`state` has no `globl_step`; did you mean 'global"):
        _ = state.globl_step


SCHEDULES = {
    "linear": lambda steps: get_scheduler("linear", steps, 2, 8),
    "cosine": lambda steps: get_scheduler("cosine", steps, 2, 8),
    "constant": lambda steps: get_scheduler("constant", steps, 2, 8),
    "MindFormers": lambda steps: schedules.LinearWithWarmUpLR(
        steps, total_steps=8, warmup_steps=2, warmup_lr_init=0.1
    ),
    "restarts": lambda steps: schedules.CosineAnnealingWarmRestarts(steps, t_0=3),
}


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_can_be_called(name):
    """Calling a schedule with a step returns the rate that the optimizer has at this step."""
    steps = optimizer()
    schedule = SCHEDULES[name](steps)
    view = PyNativeSchedule(schedule)
    rates = []
    for _ in range(8):
        rates.append(steps.param_groups[0]["lr"])
        schedule.step()

    found = torch.stack([view(torch.tensor(step)) for step in range(8)])
    torch.testing.assert_close(found, torch.tensor(rates))
    assert view.last_epoch == 8
    assert view.get_last_lr() == schedule.get_last_lr()


def test_a_rate_that_is_a_tensor():
    """A rate that is a tensor stays on its device."""
    steps = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    view = PyNativeSchedule(schedules.ConstantWarmUpLR(steps, warmup_steps=2))

    assert view(1).item() == 0.25


def test_a_schedule_without_a_formula():
    """A schedule that has no formula says what to read instead."""
    view = PyNativeSchedule(torch.optim.lr_scheduler.StepLR(optimizer(), 3))

    with pytest.raises(TypeError, match=r"StepLR has no formula for a step; read `lr_scheduler\."):
        view(3)


USES = {
    "truth": bool,
    "attribute": lambda value: value.active,
    "call": lambda value: value(),
    "item": lambda value: value[0],
    "iteration": list,
    "order": lambda value: value > 1,
    "equality": lambda value: value == 1,
    "number": int,
    "division": lambda value: 3 / value,
}


@pytest.mark.parametrize("use", USES)
def test_an_absent_value_is_refused_when_it_is_used(use):
    """Any use of a value that stands in for an absent keyword raises its sentence."""
    value = AbsentValue("monitor")

    with pytest.raises(
        RuntimeError, match=r"^`monitor` is unknown in a Trainer; write `.*Monitor`"
    ):
        USES[use](value)


def test_an_absent_value_can_be_passed_on():
    """Printing and copying keywords does not raise."""
    value = AbsentValue("monitor")

    assert value is not None
    assert "monitor" in repr(copy.copy({"monitor": value}))
    assert "monitor" in repr(copy.deepcopy(value))
    assert hasattr(SimpleNamespace(monitor=value), "monitor")


def test_a_section_is_a_mapping():
    """A section can be passed as keywords, and shows its values."""
    section = PyNativeSection("args.own", {"a": 1, "b": 2})

    assert dict(**section) == {"a": 1, "b": 2}
    assert (len(section), "a" in section, repr(section)) == (2, True, "args.own: {'a': 1, 'b': 2}")
