"""`MFTrainer` refuses optimizers that update in backward, full disks and ranks that disagree."""

import shutil
import warnings

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from transformers.training_args import OptimizerNames

from mfwrap.callbacks import CheckpointMonitor
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from support.ranks.trainers import APART, EPOCHS_APART, ROWS, Line, run_apart, run_dry
from support.small_llama import needs_stages, small_llama, split_for_generation


class _Taking(Line):
    def forward(self, inputs, labels, num_items_in_batch=None):
        loss = super().forward(inputs, labels)["loss"]
        return {"loss": loss if num_items_in_batch is None else loss * 2 / num_items_in_batch}


class _Ignoring(MFTrainer):
    def compute_loss(self, model, inputs, return_outputs=None, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class _IgnoringKeywords(MFTrainer):
    def compute_loss(self, model, inputs, return_outputs=None, **_kwargs):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class _Dividing(MFTrainer):
    def compute_loss(self, model, inputs, return_outputs=None, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"] / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class _PassingOn(MFTrainer):
    def compute_loss(self, model, inputs, return_outputs=None, **kwargs):
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class _Stock(Trainer):
    compute_loss = _Ignoring.compute_loss


class _Below(MFTrainerMixin, _Stock):
    pass


class _PassingOnBelow(_Below):
    def compute_loss(self, model, inputs, return_outputs=None, **kwargs):
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize(
    "kind",
    [MFTrainer, _Ignoring, _IgnoringKeywords, _Dividing, _PassingOn, _Below, _PassingOnBelow],
)
def test_losses_that_are_added_up_are_told(kind, accepts, steps, tmp_path):
    """A warning says so exactly if the loss of two like micro-batches is twice that of one."""
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 1}
    settings |= {"logging_steps": 1, "save_strategy": "no", "learning_rate": 0.0}
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=steps,
        **settings,
    )
    rows = [{"inputs": torch.tensor([1.0, 2.0]), "labels": torch.tensor(3.0)}] * 4
    line = _Taking()
    trainer = kind(line, arguments, train_dataset=rows)
    trainer.model_accepts_loss_kwargs = accepts
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    mean = line(**batch)["loss"].detach().item()
    is_told = any("ignores `num_items_in_batch`" in str(one.message) for one in told)

    if kind in {MFTrainer, _PassingOn, _Dividing}:
        assert not is_told
    else:
        is_sum = trainer.state.log_history[0]["loss"] == pytest.approx(2 * mean, rel=1e-4)
        assert is_told == is_sum == (accepts and steps == 2)


def test_a_disk_without_room_for_a_checkpoint(tmp_path, monkeypatch):
    """The training is refused before its first update, unless nothing saves checkpoints."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 1}

    def train(*callbacks):
        """Train for one step."""
        arguments = TrainingArguments(str(tmp_path), **settings)
        MFTrainer(Line(), arguments, train_dataset=ROWS, callbacks=list(callbacks)).train()

    refused = pytest.raises(
        RuntimeError, match=r"a checkpoint takes at least 0.0 MB, but .* has 0.0 MB"
    )
    with refused:
        train()
    settings["save_strategy"] = "no"
    with refused:
        train(CheckpointMonitor(save_checkpoint_steps=1))
    train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("name", "instead"),
    [("lomo", "sgd"), ("adalomo", "adafactor"), ("galore_adamw_layerwise", "galore_adamw")],
)
def test_an_optim_that_updates_in_backward(tmp_path, name, instead):
    """The construction is refused in one sentence, which names a similar optimizer."""
    args = TrainingArguments(str(tmp_path), optim=name, use_cpu=True)
    message = (
        f"`optim` must be an optimizer that changes its weights after backward, got '{name}', "
        "which changes them during backward, before the step can know of an overflow; use "
        f"'{instead}'"
    )

    with pytest.raises(ValueError, match="`optim`") as refusal:
        MFTrainer(Line(), args, train_dataset=ROWS)
    assert str(refusal.value) == message


def test_every_layer_wise_optim_is_refused(tmp_path):
    """Each layer-wise value of `optim` is refused; the value to use instead exists."""
    names = [each.value for each in OptimizerNames if each.value.endswith("_layerwise")]

    assert len(names) >= 4
    for name in names:
        args = TrainingArguments(str(tmp_path), optim=name, use_cpu=True)
        with pytest.raises(ValueError, match="`optim` must be an optimizer") as refusal:
            MFTrainer(Line(), args, train_dataset=ROWS)
        instead = str(refusal.value).rpartition("; use ")[2].strip("'")
        assert OptimizerNames(instead).value == name.removesuffix("_layerwise")


def test_a_given_optimizer_that_updates_in_backward(tmp_path):
    """A layer-wise optimizer is refused at construction if the trainer is given one."""
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    optimizer = LayerWiseDummyOptimizer({})

    with pytest.raises(TypeError, match="got LayerWiseDummyOptimizer, which changes them during"):
        MFTrainer(Line(), args, train_dataset=ROWS, optimizers=(optimizer, None))


def test_an_optimizer_of_another_model(tmp_path):
    """An optimizer that holds no parameter of the model would train nothing."""
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, save_strategy="no")
    optimizer = torch.optim.SGD(Line().parameters(), lr=0.1)
    trainer = MFTrainer(Line(), args, train_dataset=ROWS, optimizers=(optimizer, None))

    with pytest.raises(RuntimeError, match="the optimizer must hold parameters of the model, got"):
        trainer.train()


@needs_stages
def test_stages_of_transformers_are_refused(tmp_path):
    """A network that transformers has split for generation is refused at construction."""
    args = TrainingArguments(str(tmp_path), use_cpu=True)

    with pytest.raises(ValueError, match="must not be split by transformers, got pp_size=2"):
        MFTrainer(split_for_generation(small_llama()), args, train_dataset=ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_ranks_that_differ(two_ranks, tmp_path, name):
    """Both ranks raise the same error before the first update; it names both ranks."""
    first, second = two_ranks.run(run_apart, str(tmp_path), name)

    assert first == second
    assert APART[name][1] in first


@pytest.mark.parametrize("name", EPOCHS_APART)
def test_epochs_that_differ(two_ranks, tmp_path, name):
    """If something is due at the end of an epoch, epochs must have the same length on all ranks.

    Callbacks that are not mfwrap's may differ.
    """
    first, second = two_ranks.run(run_apart, str(tmp_path), name)

    assert first == second
    assert first.endswith(": data: number of updates in an epoch is 10 on rank 0 but 8 on rank 1")


@pytest.mark.slow
def test_a_rank_whose_data_end_early(tmp_path):
    """The rank with fewer batches is named within seconds, and no rank waits for a timeout."""
    outcomes = run_dry(tmp_path)

    assert "rank 1 has no batch for update 6, but rank 0 has begun update 6" in outcomes[1]
    assert "rank 1 has ended its training after update 5" in outcomes[0]
