"""Each tracker has the record of every step once, at its own step, beside the loop's numbers."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import LoopMonitor
from mfwrap.callbacks.loop.trackers import Trackers
from mfwrap.compatibility.foreign import is_installed
from support.attached_runs import new_accelerator
from support.deferral import late_results
from support.trackers import (
    have_wandb_offline,
    mlflow_rows,
    tensorboard_rows,
    trackio_rows,
    wandb_rows,
)

NUM_STEPS = 5


def train(folder, kind, *, logs_first, init=None):
    """Train with a tracker of accelerate, to which the loop logs too; return the losses."""
    torch.manual_seed(0)
    accelerator = new_accelerator(log_with=kind, project_dir=str(folder))
    accelerator.init_trackers("run", init_kwargs={} if init is None else {kind: init})
    attached = attach(accelerator, StepConfig(local_norm=True, use_clip_grad=True))
    network = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    network, optimizer = accelerator.prepare(network, optimizer)
    monitor = LoopMonitor(attached, folder / "run", find_culprit=False)
    losses = []
    for step in range(1, NUM_STEPS + 1):
        loss = network(torch.randn(4, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if logs_first:
            accelerator.log({"loss": losses[-1]}, step=step)
        monitor.end_step()
        if not logs_first:
            accelerator.log({"loss": losses[-1]}, step=step)
    accelerator.end_training()
    return losses


def check(rows, losses, names=("loss", "mfwrap/loss")):
    """Check the rows of all steps, which may be one or two for each step."""
    for name in names:
        found = [(row["_step"], row[name]) for row in rows if name in row]
        assert found == [(n, pytest.approx(loss)) for n, loss in enumerate(losses, 1)]
    assert all("mfwrap/local_norm/weight" in row for row in rows if "mfwrap/loss" in row)


@pytest.mark.parametrize("logs_first", [True, False])
def test_tensorboard(tmp_path, logs_first):
    """Curves of the loop and of the monitor have each step once."""
    losses = train(tmp_path, "tensorboard", logs_first=logs_first)

    check(tensorboard_rows(tmp_path / "run"), losses)


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch):
    """Have wandb write into the test's folder, without a network."""
    have_wandb_offline(tmp_path, monkeypatch)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("logs_first", [True, False])
@pytest.mark.usefixtures("wandb_offline")
def test_wandb(tmp_path, logs_first):
    """An offline run of wandb has one row for each step, with the numbers of both."""
    losses = train(tmp_path, "wandb", logs_first=logs_first, init={"dir": str(tmp_path)})

    rows = wandb_rows(tmp_path)
    check(rows, losses)
    assert [row["mfwrap/step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all("loss" in row and "mfwrap/loss" in row for row in rows)


@pytest.mark.parametrize(
    ("log_at", "rows_of_records"),
    [
        # Between backward and `optimizer.step`, where the norm becomes known.
        (lambda n: {"before update": n}, [1, 2, 3, 4, 5]),
        # Before the forward pass, such as the time for loading data.
        (lambda n: {"before forward": n}, [1, 2, 3, 4, 5]),
        # At numbers of samples.
        (lambda n: {"after update": 8 * n}, [8, 16, 24, 32, 40]),
        # At numbers of samples, in every second update.
        (lambda n: {"after update": 8 * n} if n % 2 == 0 else {}, [1, 16, 17, 32, 33]),
        # Both before and after the update.
        (lambda n: {"before update": n, "after update": n}, [1, 2, 3, 4, 5]),
        # To the run itself, of which the accelerator knows nothing.
        (lambda n: {"direct": n}, [1, 2, 3, 4, 5]),
        # Without a number: wandb then counts the calls.
        (lambda _: {"before update": None, "after update": None}, None),
    ],
)
@pytest.mark.parametrize("arrives_late", [False, True])
@pytest.mark.usefixtures("wandb_offline")
def test_wandb_has_each_record_once(tmp_path, log_at, rows_of_records, arrives_late, caplog):
    """Wherever the loop logs, and whatever it counts, no record and no own number is lost."""
    with late_results() if arrives_late else contextlib.nullcontext():
        losses, logged = train_and_log(tmp_path, log_at)

    rows = wandb_rows(tmp_path)
    records = [(row["mfwrap/step"], row["mfwrap/loss"]) for row in rows if "mfwrap/step" in row]
    assert records == [(n, pytest.approx(loss)) for n, loss in enumerate(losses, 1)]
    for name, numbers in logged.items():
        assert [row[name] for row in rows if name in row] == numbers
    if rows_of_records is not None and not arrives_late:
        assert [row["_step"] for row in rows if "mfwrap/step" in row] == rows_of_records
    warnings = [one for one in caplog.records if one.name == "mfwrap.callbacks.loop"]
    assert len(warnings) == any(
        row["_step"] != row.get("mfwrap/step", row["_step"]) for row in rows
    )


def train_and_log(folder, log_at):
    """Train with wandb; log each update's number at the places and steps that `log_at` names.

    Returns:
        The losses, and the numbers that the loop has logged, by their names.
    """
    torch.manual_seed(0)
    accelerator = new_accelerator(log_with="wandb", project_dir=str(folder))
    accelerator.init_trackers("run", init_kwargs={"wandb": {"dir": str(folder)}})
    attached = attach(accelerator, StepConfig(use_clip_grad=True))
    network = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    network, optimizer = accelerator.prepare(network, optimizer)
    monitor = LoopMonitor(attached, folder / "run", find_culprit=False)
    losses, logged = [], {}
    direct = accelerator.get_tracker("wandb", unwrap=True)

    def log(place, number):
        places = log_at(number)
        if place in places:
            logged.setdefault(place, []).append(number)
            to = direct if place == "direct" else accelerator
            to.log({place: number}, step=places[place])

    for number in range(1, NUM_STEPS + 1):
        log("before forward", number)
        loss = network(torch.randn(4, 4)).square().mean()
        accelerator.backward(loss)
        log("before update", number)
        log("direct", number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        monitor.end_step()
        log("after update", number)
    accelerator.end_training()
    return losses, logged


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("logs_first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path, logs_first, monkeypatch):
    """An MLflow run in SQLite has each step once."""
    pytest.importorskip("mlflow", reason="needs mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    losses = train(tmp_path, "mlflow", logs_first=logs_first)

    check(mlflow_rows(uri), losses)


def test_trackio(tmp_path, monkeypatch):
    """A local trackio project has each step once."""
    from trackio import utils  # noqa: PLC0415  (slow)

    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    assert tmp_path / "trackio" == utils.TRACKIO_DIR
    losses = train(tmp_path, "trackio", logs_first=True)

    # Before 1.14, accelerate drops the steps of what the loop logs itself.
    names = ("loss", "mfwrap/loss") if is_installed("accelerate", "1.14") else ("mfwrap/loss",)
    check(trackio_rows(tmp_path / "trackio"), losses, names)


class Run:
    """Rows as wandb keeps them: one for each step, none for an earlier step."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: dict[int, dict] = {}
        self.axes: list[tuple] = []

    def define_metric(self, name, step_metric=None):
        """Keep the axis of a metric."""
        self.axes.append((name, step_metric))

    def log(self, values, step):
        """Add values to the row of a step."""
        if step >= self.step:
            self.step = step
            self.rows.setdefault(step, {}).update(values)


def test_a_wandb_run_that_is_ahead_loses_nothing(caplog):
    """If the loop has logged a later step, the numbers go there, drawn over their own step."""
    run = Run()
    trackers = Trackers([run], "mfwrap/")
    run.log({"seen": 64}, step=64)
    trackers.log({"loss": 1.0}, 1)

    assert run.rows == {64: {"seen": 64, "mfwrap/loss": 1.0, "mfwrap/step": 1}}
    assert run.axes == [("mfwrap/step", None), ("mfwrap/*", "mfwrap/step")]
    assert "newest row of wandb is 64, so the numbers of update 1 are in row 64" in caplog.text


def test_a_plain_loop_that_logs_before_its_update_loses_nothing(tmp_path):
    """Without an accelerator nothing tells that the loop logs, so each record is a row later."""
    network, run = nn.Linear(2, 1), Run()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    with LoopMonitor(optimizer, tmp_path, model=network, trackers=run) as monitor:
        for number in range(1, NUM_STEPS + 1):
            loss = network(torch.ones(4, 2)).square().mean()
            loss.backward()
            run.log({"norm": number}, step=number)
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step(loss)
            losses.append(loss.item())
            if number == 3:
                monitor.flush()  # for a checkpoint

    records = [row for _, row in sorted(run.rows.items()) if "mfwrap/step" in row]
    assert [row["mfwrap/step"] for row in records] == [1, 2, 3, 4, 5]
    assert [row["mfwrap/loss"] for row in records] == pytest.approx(losses)
    assert [row["norm"] for row in run.rows.values() if "norm" in row] == [1, 2, 3, 4, 5]


def test_writers_modules_and_functions(tmp_path):
    """A SummaryWriter, an object like the module mlflow, and a function get the numbers."""

    class Module:
        calls: list[tuple] = []  # noqa: RUF012  (one test alone uses the class)

        def log_metrics(self, values, step):
            """Keep the call."""
            self.calls.append((values, step))

    writer, module, given = SummaryWriter(tmp_path), Module(), []
    trackers = Trackers([writer, module, lambda *call: given.append(call)], "m/")
    trackers.log({"loss": 0.5}, 7)
    writer.close()

    assert tensorboard_rows(tmp_path) == [{"_step": 7, "m/loss": 0.5}]
    assert module.calls == given == [({"m/loss": 0.5}, 7)]
