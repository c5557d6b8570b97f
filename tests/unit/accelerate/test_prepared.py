"""Attached objects pickle as accelerate's own, and an attached step pickles with its state."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedDataParallelKwargs

from mfwrap import DynamicLossScaleUpdateCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.accelerate.schedules import AttachedScheduler
from support.attached_runs import new_accelerator
from support.pickled_training import MyAccelerator, average, load_in_a_new_process, prepare

# torch says this of every schedule that is unpickled before its first step.
pytestmark = pytest.mark.filterwarnings("ignore:Seems like .optimizer.step")

NAN = float("nan")


def with_pickle(value):
    """Return a copy of a value, made by pickle."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301  (pickled just now)


def with_torch(value):
    """Return a copy of a value, made by ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


each_way = pytest.mark.parametrize("way", [with_pickle, with_torch])


def prepared_with_everything(kind=Accelerator):
    """Return an attached training that uses every feature, and its step."""
    accelerator = kind(cpu=True)
    loss_scale = DynamicLossScaleUpdateCell(2.0**10, 2, 2)
    step = attach(accelerator, StepConfig(local_norm=True), average, scale_sense=loss_scale)
    return prepare(accelerator), step


@each_way
def test_a_prepared_optimizer_pickles_as_accelerates_own(way):
    """A loaded optimizer is of accelerate's class, holds torch's optimizer alone, and updates."""
    prepared, _ = prepared_with_everything()
    prepared.update()
    prepared.update(NAN)

    loaded = way(prepared.optimizer)

    assert type(loaded) is AcceleratedOptimizer
    assert loaded.scaler is None
    assert loaded.step_was_skipped is True
    assert b"mfwrap" not in pickle.dumps(prepared.optimizer)
    (weight, bias) = loaded.param_groups[0]["params"]
    assert torch.equal(weight, prepared.network.weight)
    assert weight is not prepared.network.weight
    before = weight.clone()
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    loaded.step()
    assert not torch.equal(weight, before)


@each_way
@pytest.mark.parametrize("kind", [Accelerator, MyAccelerator])
def test_an_attached_accelerator_pickles_without_the_step(kind, way):
    """A loaded accelerator is of the user's class, with the same hooks, and all it has prepared."""
    prepared, _ = prepared_with_everything(kind)
    prepared.accelerator.register_save_state_pre_hook(with_pickle)
    prepared.update()

    loaded = way(prepared.accelerator)

    assert type(loaded) is kind
    assert not hasattr(loaded, "attachment")
    assert list(loaded._save_model_state_pre_hook.values()) == [with_pickle]
    assert list(loaded._load_model_state_pre_hook.values()) == []
    assert [type(each) for each in loaded._optimizers] == [AcceleratedOptimizer]
    assert [type(each) for each in loaded._schedulers] == [AcceleratedScheduler]
    assert loaded._schedulers[0].get_last_lr() == [0.05]
    assert len(prepared.accelerator._save_model_state_pre_hook) == 2


def test_an_unpickled_accelerator_trains_as_accelerate_does():
    """What was pickled together belongs together, and trains without the step."""
    prepared, _ = prepared_with_everything()
    loaded = type(prepared)(*with_pickle(tuple(prepared)))
    plain = prepare(Accelerator(cpu=True))

    for training in (loaded, plain):
        training.update()
        training.update()

    assert torch.equal(loaded.network.weight, plain.network.weight)
    assert loaded.schedule.get_last_lr() == plain.schedule.get_last_lr() == [0.025]


@pytest.mark.usefixtures("_late_results")
@pytest.mark.parametrize("factor", [1.0, NAN], ids=["applied", "skipped"])
@pytest.mark.parametrize("name", ["optimizer", "schedule", "accelerator"])
def test_what_is_pending_is_done_before_it_is_pickled(name, factor):
    """A pickle has the rates of the next update, though only the device knows the last outcome."""
    prepared, _ = prepared_with_everything()
    prepared.update(factor)
    expected = 0.05 if factor == 1 else 0.1

    loaded = with_pickle(getattr(prepared, name))

    optimizer = {
        "optimizer": lambda: loaded,
        "schedule": lambda: loaded.scheduler.optimizer,
        "accelerator": lambda: loaded._optimizers[0],
    }[name]()
    assert optimizer.param_groups[0]["lr"] == expected


def test_the_gradient_scaler_continues_from_the_steps_scale():
    """In fp16, a loaded accelerator and its optimizer share one scaler with the step's scale."""
    accelerator = new_accelerator("fp16")
    step = attach(accelerator, scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 100))
    prepared = prepare(accelerator)
    prepared.update(NAN)

    loaded = with_pickle(accelerator)

    assert type(loaded.scaler) is torch.amp.GradScaler
    assert loaded.scaler is loaded._optimizers[0].scaler
    assert loaded.scaler.get_scale() == step.loss_scale == 2.0**9


def test_the_handler_of_distributed_data_parallel_pickles_as_accelerates_own():
    """A handler that takes local norms pickles as accelerate's handler, with its settings."""
    handler = DistributedDataParallelKwargs(bucket_cap_mb=7)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    attach(accelerator, StepConfig(local_norm=True))

    loaded = with_pickle(accelerator)

    assert type(accelerator.ddp_handler) is not DistributedDataParallelKwargs
    assert type(loaded.ddp_handler) is DistributedDataParallelKwargs
    assert loaded.ddp_handler.bucket_cap_mb == 7


def test_a_copied_optimizer_is_prepared_as_any_other():
    """A copy of a prepared optimizer can be prepared by another attached accelerator."""
    prepared, _ = prepared_with_everything()
    prepared.update()
    copied = copy.deepcopy(prepared.optimizer)
    accelerator = Accelerator(cpu=True)
    step = attach(accelerator)

    optimizer = accelerator.prepare(copied)

    assert optimizer.attachment is step.attachment
    assert optimizer.scaler is accelerator.scaler
    assert optimizer.optimizer is copied.optimizer


@each_way
@pytest.mark.parametrize("num_updates", [0, 1, 2])
def test_a_pickled_step_goes_on_with_what_is_pickled_with_it(num_updates, way):
    """A step that is pickled with its training goes on bitwise, with scale, counts and average."""
    prepared, step = prepared_with_everything(MyAccelerator)
    for factor in (1.0, NAN)[:num_updates]:
        prepared.update(factor)

    *parts, loaded_step = way((*prepared, step))
    loaded = type(prepared)(*parts)
    for factor in (1.0, NAN, 1.0):
        prepared.update(factor)
        loaded.update(factor)

    assert loaded.accelerator.attachment is loaded_step.attachment
    assert isinstance(loaded.schedule, AttachedScheduler)
    assert loaded.accelerator.optimizer_step_was_skipped is False
    assert torch.equal(loaded.network.weight, prepared.network.weight)
    assert loaded.schedule.get_last_lr() == prepared.schedule.get_last_lr()
    reports = [each.last_report for each in (loaded_step, step)]
    assert reports[0].skipped_updates == reports[1].skipped_updates >= 1
    assert loaded_step.loss_scale == step.loss_scale
    averages = [dict(each.ema.named_averages()) for each in (loaded_step, step)]
    torch.testing.assert_close(*averages, rtol=0, atol=0)


def test_a_pickled_step_of_parameters_outside_of_all_models_goes_on():
    """An optimizer of a model that was not prepared is added to the loaded step, too."""
    accelerator = Accelerator(cpu=True)
    step = attach(accelerator)
    network = torch.nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(network.parameters(), lr=0.1))
    accelerator.backward(network(torch.ones(1, 2)).sum())
    optimizer.step()

    loaded_step, _ = with_pickle((step, accelerator))

    (window,) = loaded_step.attachment.step.windows.values()
    assert window.update.counts.applied_updates == 1


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_step_is_its_own_copy(way):
    """A step is its own copy, as an accelerator is under `copy.deepcopy`, and trains on."""
    prepared, step = prepared_with_everything()

    copied = way(step)
    prepared.update(1.0)

    assert copied is step
    assert prepared.accelerator.attachment is step.attachment
    assert step.last_report.applied_updates == 1


def test_the_loss_scale_is_pickled_before_anything_is_prepared():
    """A step that has prepared nothing yet pickles its loss scale."""
    accelerator = Accelerator(cpu=True)
    step = attach(accelerator, scale_sense=8.0)
    accelerator.scaler.update(4.0)

    assert with_pickle(step).loss_scale == 4


@pytest.mark.slow
def test_a_process_without_mfwrap_loads_what_was_prepared(tmp_path):
    """A new process loads prepared objects without mfwrap, and imports mfwrap to load a step."""
    prepared, step = prepared_with_everything(MyAccelerator)
    prepared.update()
    loaded = load_in_a_new_process(tuple(prepared), tmp_path / "prepared")
    again = load_in_a_new_process((*prepared, step), tmp_path / "step")
    prepared.update()

    names = ["MyAccelerator", "Linear", "AcceleratedOptimizer", "AcceleratedScheduler"]
    assert (loaded["modules"], loaded["types"]) == ([], names)
    assert again["types"][-1] == "AttachedStep"
    assert again["weight"] == prepared.network.weight.tolist()
