"""Checkpoints of `Model`: complete, resumable, and deleted when they are old."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mfwrap import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    Model,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
)
from mfwrap.callbacks import Callback, CheckpointConfig, LambdaCallback, ModelCheckpoint
from support.model_runs import batches, classifier, sgd
from support.programs import Program

KEEP_ALL = {"keep_checkpoint_max": 0}


def model() -> Model:
    """Return a small classifier with its loss and SGD."""
    network = classifier()
    return Model(network, nn.CrossEntropyLoss(), sgd(network))


def names(folder) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(path.name for path in folder.iterdir())


def whole_model():
    """Return a model with loss scale, schedule and average, and its parts."""
    network = classifier()
    optimizer = sgd(network)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    cell = MFTrainOneStepCell(
        WithLossCell(network, nn.CrossEntropyLoss()),
        optimizer,
        scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
        lr_scheduler=schedule,
        ema=ExponentialMovingAverage(network, 0.9),
    )
    return Model(cell), cell, network, optimizer, schedule


def test_a_training_goes_on_from_a_checkpoint(tmp_path):
    """A resumed training ends with the state of an uninterrupted training.

    The state covers weights, loss scale and average.
    """
    data = batches(8)
    whole, whole_cell, network, *_ = whole_model()
    whole.train(1, data)
    first, *_ = whole_model()
    first.train(1, data[:5], callbacks=ModelCheckpoint("a", tmp_path))

    state = torch.load(tmp_path / "a-1_5.ckpt", weights_only=True)
    second, cell, resumed, optimizer, resumed_schedule = whole_model()
    resumed.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    cell.load_state_dict(state["cell"])
    resumed_schedule.load_state_dict(state["lr_scheduler"])
    second.train(1, data[5:])

    assert (state["epoch_num"], state["step_num"]) == (1, 5)
    for ours, theirs in zip(resumed.parameters(), network.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(cell.scale_sense, whole_cell.scale_sense)
    ours, theirs = cell.ema.state_dict()["averages"], whole_cell.ema.state_dict()["averages"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class WithCentres(nn.Module):
    """A loss function with trainable weights."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(4))

    def forward(self, scores, label):
        return nn.functional.cross_entropy(scores + self.centres, label)


@pytest.mark.parametrize("in_cell", [False, True])
def test_weights_of_a_loss_function_are_saved(tmp_path, in_cell):
    """A checkpoint has one entry for the network's weights and one for the loss function's."""
    network, loss_fn = classifier(), WithCentres()
    optimizer = torch.optim.SGD([*network.parameters(), *loss_fn.parameters()], lr=0.1)
    cell = TrainOneStepCell(WithLossCell(network, loss_fn), optimizer)
    trained = Model(cell) if in_cell else Model(network, loss_fn, optimizer)
    trained.train(1, batches(2), callbacks=ModelCheckpoint("a", tmp_path))
    state = torch.load(tmp_path / "a-1_2.ckpt", weights_only=True)

    assert state["network"].keys() == network.state_dict().keys()
    assert torch.equal(state["loss_fn"]["centres"], loss_fn.centres)
    assert loss_fn.centres.abs().min() > 0


def test_the_schedule_and_scale_of_a_model_are_saved(tmp_path):
    """A checkpoint has the schedule and the loss scale as they are after its step."""
    network = classifier()
    optimizer = sgd(network, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trained = Model(
        network,
        nn.CrossEntropyLoss(),
        optimizer,
        loss_scale_manager=DynamicLossScaleManager(8.0, 2, 2),
        lr_scheduler=schedule,
    )
    trained.train(1, batches(3), callbacks=ModelCheckpoint("a", tmp_path))
    state = torch.load(tmp_path / "a-1_3.ckpt", weights_only=True)

    assert state["lr_scheduler"]["last_epoch"] == 3
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.125
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(network, nn.CrossEntropyLoss()),
        optimizer,
        DynamicLossScaleManager(8.0, 2, 2).get_update_cell(),
    )
    cell.load_state_dict(state["cell"])
    assert float(cell.scale_sense) == float(trained.train_network.scale_sense) == 16.0
    with pytest.raises(KeyError, match="this cell must have the keys"):
        cell.load_state_dict({})


def test_when_and_which(tmp_path):
    """Due steps and the last step are saved, and only the newest checkpoints are kept."""
    callback = ModelCheckpoint("a", tmp_path / "new", CheckpointConfig(3, **KEEP_ALL))
    model().train(2, batches(4), callbacks=callback)
    assert names(tmp_path / "new") == ["a-1_3.ckpt", "a-2_2.ckpt", "a-2_4.ckpt"]
    assert callback.latest_ckpt_file_name == str(tmp_path / "new" / "a-2_4.ckpt")

    kept = ModelCheckpoint("b", tmp_path / "new", CheckpointConfig(1, keep_checkpoint_max=2))
    model().train(2, batches(4), callbacks=kept)
    assert [name for name in names(tmp_path / "new") if name[0] == "b"] == [
        "b-2_3.ckpt",
        "b-2_4.ckpt",
    ]


def test_by_time(tmp_path):
    """With saving by time, the first checkpoint of each period and the newest one are kept."""
    now = [0.0]

    def pass_half_a_minute(_):
        now[0] += 30

    config = CheckpointConfig(0, 30, 0, 2)
    callbacks = [
        LambdaCallback(on_train_step_begin=pass_half_a_minute),
        ModelCheckpoint("a", tmp_path, config, clock=lambda: now[0]),
    ]
    model().train(1, batches(10), callbacks=callbacks)

    # Step n is saved at 30 * n seconds. A period is two minutes, or four steps.
    assert names(tmp_path) == ["a-1_1.ckpt", "a-1_10.ckpt", "a-1_5.ckpt", "a-1_9.ckpt"]


def test_another_training_has_names_of_its_own(tmp_path):
    """A new training uses new file names and keeps checkpoints of earlier trainings."""
    for _ in range(3):
        model().train(1, batches(1), callbacks=ModelCheckpoint("a", tmp_path))
    (tmp_path / "ab-1_1.ckpt").touch()

    assert names(tmp_path) == ["a-1_1.ckpt", "a_1-1_1.ckpt", "a_2-1_1.ckpt", "ab-1_1.ckpt"]


def test_two_trainings_at_once(tmp_path):
    """Each has a prefix of its own, and deletes only its own checkpoints."""

    class TrainingInside(Callback):
        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 2:
                model().train(1, batches(3), [ModelCheckpoint(directory=tmp_path, config=newest)])

    newest = CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=1)
    outer = [TrainingInside(), ModelCheckpoint(directory=tmp_path, config=newest)]
    model().train(1, batches(3), outer)

    assert names(tmp_path) == ["CKP-1_3.ckpt", "CKP_1-1_3.ckpt"]


def test_a_training_in_another_program(tmp_path):
    """A prefix that another program writes is left to it, although it has no checkpoint yet."""
    program = (
        "import sys; from pathlib import Path; from mfwrap.checkpoints.locks import *\n"
        "with owning(lock_of(Path(sys.argv[1]))): print(flush=True); sys.stdin.read()"
    )
    with Program(program, tmp_path / "CKP") as other:
        other.stdout.readline()
        config = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=1)
        model().train(1, batches(2), [ModelCheckpoint(directory=tmp_path, config=config)])

    assert names(tmp_path) == ["CKP_1-1_2.ckpt"]


def test_a_checkpoint_of_an_error_is_not_replaced(tmp_path):
    """A training after one that has failed takes another prefix."""
    (tmp_path / "CKP-1_1_breakpoint.ckpt").write_text("mine")
    config = CheckpointConfig(save_checkpoint_steps=1)
    model().train(1, batches(1), [ModelCheckpoint(directory=tmp_path, config=config)])

    assert names(tmp_path) == ["CKP-1_1_breakpoint.ckpt", "CKP_1-1_1.ckpt"]


def test_a_checkpoint_that_breaks_off_is_not_there(tmp_path, monkeypatch):
    """An error while writing leaves no checkpoint."""

    def breaks(state, path):
        path.write_bytes(b"half")
        raise OSError

    monkeypatch.setattr(torch, "save", breaks)
    with pytest.raises(OSError):  # noqa: PT011  (raised by the test itself, without a message)
        model().train(1, batches(1), callbacks=ModelCheckpoint("a", tmp_path))

    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("saves", [True, False])
def test_when_a_training_raises(tmp_path, saves):
    """With ``exception_save``, an error in training saves a last checkpoint."""

    class Raises(Callback):
        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 2:
                raise KeyError

    config = CheckpointConfig(5, exception_save=saves)
    with pytest.raises(KeyError):
        model().train(1, batches(3), callbacks=[ModelCheckpoint("a", tmp_path, config), Raises()])

    assert names(tmp_path) == (["a-1_2_breakpoint.ckpt"] if saves else [])


def test_weights_alone(tmp_path):
    """A checkpoint in the safetensors format has only weights: those of `saved_network`."""
    network = classifier()
    config = CheckpointConfig(format="safetensors", saved_network=network[0])
    trained = Model(network, nn.CrossEntropyLoss(), sgd(network))
    trained.train(1, batches(1), callbacks=ModelCheckpoint("a", tmp_path, config))

    saved = load_file(tmp_path / "a-1_1.safetensors")
    assert sorted(saved) == ["bias", "weight"]
    assert torch.equal(saved["weight"], network[0].weight)


def test_additional_information(tmp_path):
    """``append_info`` adds entries, and raises for an entry that checkpoints already have."""
    config = CheckpointConfig(append_info=["epoch_num", {"dataset": "digits"}])
    model().train(1, batches(1), callbacks=ModelCheckpoint("a", tmp_path, config))
    assert torch.load(tmp_path / "a-1_1.ckpt", weights_only=True)["dataset"] == "digits"

    config = CheckpointConfig(append_info=[{"network": 3}])
    with pytest.raises(ValueError, match=r"names of a checkpoint's own entries: \['network'\]"):
        model().train(1, batches(1), callbacks=ModelCheckpoint("b", tmp_path, config))


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        (("a/b",), ValueError, "prefix"),
        (("",), ValueError, "prefix"),
        (("a", None, {}), TypeError, "config"),
    ],
)
def test_bad_arguments_are_refused_by_name(settings, error, name):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=f"`{name}` must be"):
        ModelCheckpoint(*settings)
