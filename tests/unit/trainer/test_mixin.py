"""MFTrainer takes the arguments of the step and of the Trainer, and checks them."""

import contextlib
import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    FixedLossScaleUpdateCell,
    StepConfig,
)
from mfwrap.callbacks import History, MFLossMonitor
from mfwrap.callbacks.metrics_recorder import MetricsRecorder
from mfwrap.records import read_json_lines
from mfwrap.schedules.deferred import DeferredSchedule
from mfwrap.trainer import MFTrainer, MonitorCallback
from mfwrap.trainer.mixin import MFTrainerMixin, loop_settings
from support.trainer_runs import (
    assert_same_weights,
    messages_of,
    new_trainer,
    tiny_llama,
    train,
    values,
)
from support.training_state import assert_same_state
from support.versions import needs


def arguments(**settings) -> TrainingArguments:
    """Return arguments with accumulation over four micro-batches."""
    settings = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5} | settings
    return TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **settings)


@pytest.mark.parametrize(
    "config",
    [
        StepConfig(),
        StepConfig(gradient_accumulation_steps=4),
        StepConfig(max_grad_norm=0.5),
        StepConfig(local_norm=True, local_norm_groups="layer", max_consecutive_skips=7),
        StepConfig(use_clip_grad=True, use_skip_data_by_global_norm=True),
    ],
    ids=["defaults", "same accumulation", "same clipping", "norms", "spikes"],
)
def test_settings_that_agree_are_kept(config):
    """Settings are kept; only accumulation is reset to 1, because the Trainer accumulates."""
    kept = loop_settings(config, arguments())

    assert kept == dataclasses.replace(config, gradient_accumulation_steps=1)


@pytest.mark.parametrize(("kind", "is_deferred"), [("linear", True), ("greedy", False)])
def test_a_schedule_that_is_stepped_with_a_metric_is_not_deferred(kind, is_deferred, tmp_path):
    """Only a schedule that is stepped without a metric is deferred."""
    settings = {"lr_scheduler_type": kind, "eval_strategy": "steps", "eval_steps": 1}
    trainer = new_trainer(MFTrainer, tmp_path, **settings)
    trainer.create_optimizer()
    schedule = trainer.create_scheduler(num_training_steps=4, optimizer=trainer.optimizer)

    assert isinstance(schedule, DeferredSchedule) == is_deferred


class DividesTwice(Trainer):
    """A Trainer whose accelerator divides losses again, as in transformers up to 5.5.3."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps


class DividesOnce(MFTrainerMixin, DividesTwice):
    """Such a trainer with mfwrap's step."""


def test_losses_of_micro_batches_are_divided_once(tmp_path):
    """Losses, norms and weights are the same if transformers would divide losses twice."""
    ours = train(new_trainer(DividesOnce, tmp_path / "twice"))
    expected = train(new_trainer(MFTrainer, tmp_path / "once"))

    assert values(ours, "grad_norm") == values(expected, "grad_norm")
    assert values(ours, "loss") == values(expected, "loss")
    assert_same_weights(ours, expected)


class TwoDevices(TrainingArguments):
    """Arguments on a machine with two GPUs, on which one process uses DataParallel."""

    @property
    def n_gpu(self) -> int:
        return 2


def test_an_average_with_data_parallel_is_refused():
    """An average in one process with several GPUs raises an error; without it, nothing raises."""
    two = TwoDevices(output_dir="unused", use_cpu=True, report_to="none")
    model = tiny_llama()

    with pytest.raises(ValueError, match=r"`ema` must be None with DataParallel, .* with 2 GPUs"):
        MFTrainer(model=model, args=two, ema=ExponentialMovingAverage(model))
    assert MFTrainer(model=model, args=two).ema is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            StepConfig(gradient_accumulation_steps=2),
            "`gradient_accumulation_steps` of `step` must be 1, the default, or 4, .* got 2",
        ),
        (
            StepConfig(max_grad_norm=2.0),
            "`max_grad_norm` of `step` must be 1.0, the default, or 0.5, the value .* got 2.0",
        ),
        (
            StepConfig(calculate_per_token_loss=True),
            "`calculate_per_token_loss` must be False in a Trainer",
        ),
    ],
    ids=["accumulation", "clipping", "per token"],
)
def test_settings_that_contradict_the_arguments_are_refused(config, message, tmp_path):
    """A setting that contradicts the Trainer's arguments raises an error that names it."""
    with pytest.raises(ValueError, match=message):
        loop_settings(config, arguments())
    with pytest.raises(ValueError, match=message):
        new_trainer(MFTrainer, tmp_path, extras={"step": config}, max_grad_norm=0.5)


@pytest.mark.parametrize(
    ("accumulation", "sync_each_batch", "is_refused"),
    [({}, True, True), ({"num_steps": 2}, True, True), ({}, False, False)],
    ids=["arguments", "plugin", "off"],
)
def test_local_norms_of_micro_batches_that_are_reduced_one_by_one(
    accumulation, sync_each_batch, is_refused, tmp_path
):
    """The Trainer's `sync_each_batch` is honored, and excludes local norms."""
    kwargs = accumulation | {"sync_each_batch": sync_each_batch}
    settings = {
        "accelerator_config": {"gradient_accumulation_kwargs": kwargs},
        "gradient_accumulation_steps": 1 if accumulation else 2,
    }
    expected = pytest.raises(ValueError, match=r"`local_norm` must be False .* 2 micro-batches")
    with expected if is_refused else contextlib.nullcontext():
        loop_settings(StepConfig(local_norm=True), arguments(**settings))
    trainer = new_trainer(MFTrainer, tmp_path, **settings)
    assert trainer.attached.config.sync_each_batch == sync_each_batch


@pytest.mark.parametrize("step", [{"local_norm": True}, StepConfig, 1], ids=["dict", "class", "1"])
def test_what_is_no_config_is_refused(step, tmp_path):
    """A `step` that is not a StepConfig raises a TypeError."""
    with pytest.raises(TypeError, match="`step` must be a StepConfig or None, got"):
        new_trainer(MFTrainer, tmp_path, extras={"step": step})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("ema", 0.999, TypeError),
        ("scale_sense", "dynamic", TypeError),
        ("scale_sense", torch.ones(2), ValueError),
    ],
    ids=["a decay", "a word", "two scales"],
)
def test_bad_average_and_bad_scale_are_refused(name, value, error, tmp_path):
    """An invalid `ema` or `scale_sense` raises an error when the trainer is built."""
    with pytest.raises(error, match=f"`{name}` must"):
        new_trainer(MFTrainer, tmp_path, extras={name: value})


def test_an_average_of_another_model_is_refused(tmp_path):
    """An average of another model raises an error when training begins."""
    ema = ExponentialMovingAverage(tiny_llama(), 0.9)
    trainer = new_trainer(MFTrainer, tmp_path, extras={"ema": ema})

    with pytest.raises(ValueError, match="`ema` must average parameters of a prepared optimizer"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1.0),
        ({"bf16": True}, 1.0),
        ({"fp16": True}, 2.0**16),
        ({"extras": {"scale_sense": 2.0**10}}, 2.0**10),
        ({"fp16": True, "extras": {"scale_sense": 8.0}}, 8.0),
        ({"extras": {"scale_sense": FixedLossScaleUpdateCell(4.0)}}, 4.0),
        ({"extras": {"scale_sense": DynamicLossScaleUpdateCell(2.0**4, 2, 9)}}, 2.0**4),
    ],
    ids=["float32", "bf16", "fp16", "number", "number in fp16", "fixed", "dynamic"],
)
def test_the_first_loss_scale(settings, expected, tmp_path):
    """Without `scale_sense`, the first loss scale is 65536 in fp16 and otherwise 1."""
    trainer = new_trainer(MFTrainer, tmp_path, **settings)

    assert trainer.attached.loss_scale.item() == expected


def test_the_average_is_there_when_training_has_begun(tmp_path):
    """`trainer.ema` is None until training begins, when the callable `ema` builds the average."""
    given = new_trainer(MFTrainer, tmp_path / "given")
    assert given.ema is None
    made = new_trainer(
        MFTrainer, tmp_path, extras={"ema": lambda model: ExponentialMovingAverage(model, 0.5)}
    )
    assert made.ema is None

    run = train(made)

    averages = dict(made.ema.named_averages())
    assert averages.keys() == run.weights.keys()
    assert any((averages[name] != weight).any() for name, weight in run.weights.items())


@pytest.mark.parametrize(
    "give",
    [
        lambda args: MFTrainer(tiny_llama(), args, callbacks=[History()]),
        # The Trainer takes its callbacks as its tenth positional argument.
        lambda args: MFTrainer(tiny_llama(), args, *(None,) * 7, [History()]),
        lambda args: MFTrainer(tiny_llama(), args).add_callback(History()),
        lambda args: MFTrainer(tiny_llama(), args, callbacks=[TrainerCallback]).add_callback(
            History
        ),
    ],
    ids=["keyword", "positional", "added", "class"],
)
def test_a_callback_of_model_is_refused(give):
    """A callback of `Model` is refused at once, with the function that converts it."""
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")

    with pytest.raises(TypeError, match=r"must hold .* got .*as_trainer_callback.*adapt_pynative"):
        give(args)


class Noise(Dataset):
    """Eight rows that are drawn again at each read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"inputs": torch.rand(3)}


class Noisy(nn.Module):
    """A linear network whose loss depends on a random number that each forward draws."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs):
        return {"loss": (self.layer(inputs) * torch.rand(())).square().mean()}


class Resumed(MonitorCallback):
    """Record the checkpoints from which a training resumes."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def resume_from(self, folder: Path) -> None:
        self.folders.append(folder)


def test_a_resume_in_the_middle_of_an_epoch(tmp_path):
    """A resumed training draws the same random numbers; monitors get the checkpoint once.

    An empty ``resume_from_checkpoint`` trains from the start.
    """
    weights, monitors = [], []
    for checkpoint in ("", str(tmp_path / "checkpoint-2")):
        monitors.append(Resumed())
        trainer = new_trainer(
            MFTrainer,
            tmp_path,
            model=Noisy(),
            data=Noise(),
            callbacks=monitors[-1:],
            extras={"data_collator": None},
            gradient_accumulation_steps=1,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        weights.append(trainer.model.state_dict())

    assert_same_state(*weights)
    assert [each.folders for each in monitors] == [[], [tmp_path / "checkpoint-2"]]


def test_a_resume_is_logged(tmp_path, caplog):
    """The log names the checkpoint and its step, once, and says nothing of a start."""
    caplog.set_level("INFO", "mfwrap.trainer")
    lines = []
    for max_steps in (2, 4):
        trainer = new_trainer(
            MFTrainer, tmp_path, max_steps=max_steps, save_strategy="steps", save_steps=2
        )
        trainer.train(resume_from_checkpoint="auto")
        lines.append([one.getMessage() for one in caplog.records if "resuming" in one.getMessage()])

    said = f"resuming from {tmp_path / 'checkpoint-2'}, step 2 of 4"
    assert lines == [[], [said]]


def test_an_error_after_a_resume(tmp_path):
    """An error of a resumed training does not blame the checkpoint, which may be gone by then."""

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            shutil.rmtree(tmp_path / "checkpoint-2")
            msg = "no more"
            raise OSError(msg)

    settings = {"save_strategy": "steps", "save_steps": 2}
    train(new_trainer(MFTrainer, tmp_path, max_steps=2, **settings))
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[Failing()], **settings)

    with pytest.raises(OSError, match="no more"):
        trainer.train(resume_from_checkpoint=True)


class Unprepared(MFTrainer):
    """Trainer with a data loader that its accelerator has not prepared."""

    def get_train_dataloader(self) -> DataLoader:
        """Return the same data loader each time."""
        if not hasattr(self, "loader"):
            self.loader = DataLoader(self.train_dataset, 2, collate_fn=self.data_collator)
        return self.loader


def test_an_unprepared_data_loader(tmp_path):
    """A training reads a data loader of torch, and leaves it as it is."""
    trainer = new_trainer(Unprepared, tmp_path, max_steps=1)
    loader = trainer.get_train_dataloader()
    before = type(loader), dict(vars(loader)), dict(vars(loader.batch_sampler))
    trainer.train()

    assert trainer.state.global_step == 1
    assert (type(loader), vars(loader), vars(loader.batch_sampler)) == before


def an_average(model):
    """Return an average of a model's weights."""
    return ExponentialMovingAverage(model, 0.5)


def test_a_trainer_that_is_pickled_trains_with_the_step(tmp_path):
    """A pickled MFTrainer has a step of its own, with the same settings, and trains equally."""
    trainer = new_trainer(MFTrainer, tmp_path, extras={"ema": an_average}, save_strategy="no")

    loaded = pickle.loads(pickle.dumps(trainer))  # noqa: S301  (pickled just now)

    assert (
        loaded.attached.attachment
        is loaded.accelerator.attachment
        is not trainer.attached.attachment
    )
    assert loaded.callback_handler._trainer is loaded
    runs = []
    for each in (trainer, loaded):
        torch.manual_seed(0)  # of the dropout
        runs.append(train(each))
    assert_same_state(runs[0].weights, runs[1].weights)
    averages = [dict(run.trainer.ema.named_averages()) for run in runs]
    assert_same_state(averages[0], averages[1])
    assert runs[1].trainer.attached.last_report.applied_updates == len(runs[0].log) - 1


class WithRouter(nn.Module):
    """A network whose loss contains that of a router, which its output has beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        """Return the loss, and the router's part in it."""
        router = (self.weight * inputs).mean()
        return {"loss": 1 + router, "aux_loss": router}


class ReportsItsTerms(MFTrainer):
    """A Trainer that reports a loss of its own, also in evaluations."""

    def compute_loss(self, model, inputs, **options):
        """Report the router's part."""
        output = model(**inputs)
        self.attached.report_losses({"router": output["aux_loss"]})
        return (output["loss"], output) if options.get("return_outputs") else output["loss"]


@pytest.mark.parametrize("evaluates", [False, True])
def test_losses_that_a_trainer_reports_itself(tmp_path, evaluates):
    """They are those of the training, and the log has their means since the last log."""
    recorder = MetricsRecorder(tmp_path)
    trainer = new_trainer(
        ReportsItsTerms,
        tmp_path,
        model=WithRouter(),
        data=[{"inputs": torch.tensor(float(row))} for row in range(32)],
        callbacks=[recorder],
        extras={"data_collator": None},
        max_steps=4,
        learning_rate=0.0,
        logging_steps=2,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=1,
    )
    trainer.eval_dataset = [{"inputs": torch.tensor(1e6)} for _ in range(4)]
    trainer.train()

    lines = [line for line in read_json_lines(tmp_path / "metrics.jsonl") if "losses" in line]
    own = [line["losses"]["router"] for line in lines]
    assert own == pytest.approx([line["loss"] - 1 for line in lines], rel=1e-6)
    logged = [entry for entry in trainer.state.log_history if "losses/router" in entry]
    means = [sum(own[:2]) / 2, sum(own[2:]) / 2]
    assert [entry["losses/router"] for entry in logged] == pytest.approx(means, rel=1e-6)
    assert [entry["loss"] - 1 for entry in logged] == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("loss", [2.5, torch.ones(3), None])
def test_a_reported_loss_is_a_tensor_of_one_element(tmp_path, loss):
    """Anything else is refused by its name, at the call."""

    class Reports(MFTrainer):
        def compute_loss(self, model, inputs, **_):
            self.attached.report_losses({"good": torch.ones(1), "odd": loss})
            return model(**inputs)["loss"]

    data = [{"inputs": torch.tensor(float(row))} for row in range(8)]
    extras = {"data_collator": None}
    trainer = new_trainer(
        Reports, tmp_path, model=WithRouter(), data=data, extras=extras, max_steps=1
    )
    with pytest.raises(TypeError, match=r"tensors of one element, got .* as 'odd'; give the mean"):
        trainer.train()


@pytest.mark.parametrize("logging_steps", [3, 4])
def test_reported_losses_of_a_resume_between_two_logs(tmp_path, logging_steps):
    """The first mean after it has the steps before the checkpoint, too, as that of the loss."""

    def trained(folder, resumed=None, **settings):
        trainer = new_trainer(
            ReportsItsTerms,
            folder,
            model=WithRouter(),
            data=[{"inputs": torch.tensor(float(row))} for row in range(32)],
            extras={"data_collator": None},
            learning_rate=0.0,
            logging_steps=logging_steps,
            save_strategy="steps",
            save_steps=2,
            **{"max_steps": 4, **settings},
        )
        trainer.train(resume_from_checkpoint=resumed)
        return [entry for entry in trainer.state.log_history if "losses/router" in entry]

    whole = trained(tmp_path / "whole")
    assert whole
    for entry in whole:
        assert entry["losses/router"] == pytest.approx(entry["loss"] - 1, rel=1e-6)
    resumed = trained(tmp_path / "resumed", str(tmp_path / "whole/checkpoint-2"))
    assert [one["losses/router"] for one in resumed] == [one["losses/router"] for one in whole]


def test_the_losses_of_an_output_are_reported(tmp_path):
    """The log, the metrics, the monitor's lines and its curves have the output's `aux_loss`."""
    monitor = MFLossMonitor(tensorboard_dir=tmp_path / "events")
    recorder = MetricsRecorder(tmp_path)
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=WithRouter(),
        data=[{"inputs": torch.tensor(float(row))} for row in range(16)],
        callbacks=[monitor, recorder],
        extras={"data_collator": None},
        max_steps=2,
        learning_rate=0.0,
    )
    with messages_of("mfwrap.callbacks") as messages:
        trainer.train()

    metrics = [line for line in read_json_lines(tmp_path / "metrics.jsonl") if "losses" in line]
    logged = [entry for entry in trainer.state.log_history if "losses/aux_loss" in entry]
    assert len(metrics) == len(logged) == 2
    for line, entry in zip(metrics, logged, strict=True):
        aux = line["losses"]["aux_loss"]
        assert aux == entry["losses/aux_loss"] == pytest.approx(line["loss"] - 1, rel=1e-6)
        assert any(f"aux_loss: {aux:5.6f}, per_step_time" in message for message in messages)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [each.value for each in events.Scalars("aux-loss")] == [
        line["losses"]["aux_loss"] for line in metrics
    ]
    assert "compute_loss" not in vars(trainer)


class BFloat16Sum(nn.Module):
    """A bfloat16 weight whose gradient is the mean of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

    def forward(self, inputs):
        """Return the mean of the products of the weight and the inputs, in float32."""
        return {"loss": (self.weight * inputs.bfloat16()).float().mean()}


@needs("torch", "2.10", "Tensor.grad_dtype")
@pytest.mark.parametrize("in_float32", [True, False])
def test_gradients_accumulate_in_float32(in_float32, tmp_path):
    """1024 and seven ones are summed up exactly; bfloat16 loses the ones."""
    data = [{"inputs": torch.tensor(value)} for value in (1024.0, *[1.0] * 7)]
    config = StepConfig(accumulate_allreduce_grads_in_fp32=in_float32)
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_steps": 1}
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=BFloat16Sum(),
        data=data,
        extras={"step": config, "data_collator": None},
        **settings,
    )
    trainer.train()

    norm = trainer.attached.last_output.global_norm.item()
    assert (norm == (1024 + 7) / 8) is in_float32


def added_names(trainer):
    """Return the names that MFTrainer adds to a stock Trainer and its instances."""
    stock = new_trainer(Trainer, trainer.args.output_dir)
    return {*dir(trainer)} - {*dir(stock)}


@needs("transformers", "5.17", "methods of the Trainer that the mixin overrides")
def test_names_that_a_subclass_may_use_for_itself(tmp_path):
    """What the mixin adds has documented names, or such as only its own class can write."""
    added = added_names(new_trainer(MFTrainer, tmp_path))

    assert {name for name in added if not name.startswith("_")} == {
        *("attached", "batch_growth", "ema", "loss_by_row", "name_rows", "rollbacks"),
        *("run_facts", "say_resume"),
    }
    marks = ("_MFTrainerMixin__", "_mfwrap_", "__")
    assert {name for name in added if name.startswith("_") and not name.startswith(marks)} == set()


def test_attributes_of_a_subclass_stay_its_own(tmp_path):
    """A trainer that keeps things under likely names trains as without them, and keeps them."""
    likely = ["_parts", "_batch", "_losses", "_skip", "_step_config", "_evaluation", "ema"]

    class Keeping(MFTrainer):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            for name in likely:
                setattr(self, name, {name: 1.0})

        def _begin_step(self):
            pytest.fail("called a method of the subclass's own")

    kinds = (Keeping, MFTrainer)
    runs = [train(new_trainer(kind, tmp_path, extras={"ema": an_average})) for kind in kinds]

    kept = runs[0].trainer
    assert [getattr(kept, name) for name in likely] == [{name: 1.0} for name in likely]
    assert kept.attached.ema is not None
    assert_same_weights(*runs)


def test_an_attribute_that_the_parts_need_is_refused_by_name(tmp_path):
    """A subclass that takes one of the documented names is told before the first update."""

    class Taking(MFTrainer):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            self.rollbacks = 3

    trainer = new_trainer(Taking, tmp_path)
    with pytest.raises(
        TypeError, match=r"`self\.rollbacks` is an attribute of MFTrainerMixin.*Taking"
    ):
        trainer.train()
