"""`LoopMonitor` records each update of a loop of one's own once, at its own step."""

import contextlib
import copy
import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from accelerate.tracking import TensorBoardTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mfwrap import MFTrainOneStepCell, StepConfig, WithLossCell
from mfwrap.accelerate import attach
from mfwrap.callbacks import LocalNormMonitor, LoopMonitor, MFLossMonitor
from mfwrap.checkpoints.locks import RUN_LOCK
from mfwrap.checkpoints.written_files import LIST
from mfwrap.records import read_json_lines
from mfwrap.schedules import BatchGrowth
from support.attached_runs import new_accelerator
from support.deferral import late_results
from support.monitored_loop import Clock
from support.programs import Program
from support.ranks.loop_monitors import NUM_UPDATES, resume_monitored_loop
from support.trackers import tensorboard_rows

NAN = float("nan")
NUM_STEPS = 4


def rows_of(file):
    """Return the rows of a CSV file, with numbers for texts."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]


class Loop:
    """An accelerate loop of two micro-batches an update, which logs its own numbers."""

    def __init__(self, folder, *, factors=(), log_with=None, **settings) -> None:
        torch.manual_seed(0)
        self.accelerator = new_accelerator(
            gradient_accumulation_steps=2, log_with=log_with, project_dir=str(folder)
        )
        if log_with is not None:
            self.accelerator.init_trackers("logs")
        self.attached = attach(self.accelerator, StepConfig(local_norm=True, use_clip_grad=True))
        network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
        data = TensorDataset(torch.randn(2 * NUM_STEPS, 2, 4))
        loader = DataLoader(data, 1)
        self.network, self.optimizer, self.loader = self.accelerator.prepare(
            network, optimizer, loader
        )
        self.factors = dict(factors)
        self.monitor = LoopMonitor(self.attached, folder / "run", **settings)
        self.losses, self.norms = [], []

    def train(self, batches=None, *, logs=False, at_each_batch=False):
        """Train on some batches; log each update's loss before or after the monitor gets it."""
        for number, [inputs] in enumerate(self.loader if batches is None else batches):
            with self.accelerator.accumulate(self.network):
                loss = self.network(inputs).square().mean() * self.factors.get(number, 1.0)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if at_each_batch or self.accelerator.sync_gradients:
                self.monitor.end_step()
            if self.accelerator.sync_gradients:
                self.losses.append(self.attached.last_output.loss.item())
                self.norms.append(self.attached.last_output.local_norm.tolist())
                if logs:
                    step = self.monitor.global_step
                    self.accelerator.log({"loss": self.losses[-1]}, step=step)


@pytest.mark.parametrize("at_each_batch", [True, False])
@pytest.mark.parametrize("arrives_late", [True, False])
def test_each_update_has_one_record(tmp_path, at_each_batch, arrives_late):
    """JSON lines and CSV have loss, norms and weights of each update, in an accelerate loop."""
    both = ["jsonl", "trackers"]
    with late_results() if arrives_late else torch.enable_grad():
        loop = Loop(tmp_path, weight_state_format=both)
        loop.train(at_each_batch=at_each_batch)
        loop.accelerator.end_training()

    records = read_json_lines(tmp_path / "run" / "training_state.jsonl")
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    names = [f"local_norm/{name}" for name in loop.attached.local_norm_names]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [record["loss"] for record in records] == loop.losses
    assert [[record[name] for name in names] for record in records] == loop.norms
    weights = math.sqrt(sum(p.detach().double().square().sum() for p in loop.network.parameters()))
    assert records[-1]["weight_norm"] == pytest.approx(weights, rel=1e-6)
    assert [record.pop("max_grad_norm", None) for record in records] == [1.0, None, None, None]
    for record, row in zip(records, rows, strict=True):
        del record["epoch"]
        assert row == record


@pytest.mark.parametrize(("arrives_late", "expected"), [(True, [0, 1]), (False, [1, 1])])
def test_a_log_waits_for_nothing(tmp_path, arrives_late, expected):
    """A log of the next update writes what has arrived; its last backward writes the rest."""
    loop = Loop(tmp_path)
    batches = list(loop.loader)
    records, found = tmp_path / "run" / "training_state.jsonl", []
    with late_results() if arrives_late else contextlib.nullcontext():
        loop.train(batches[:2])
        loop.accelerator.log({"seconds": 0.5}, step=1)
        assert not records.exists()  # the record is beside the loop's numbers of its own update
        loop.accelerator.log({"seconds": 0.5}, step=2)
        found.append(len(read_json_lines(records)) if records.exists() else 0)
        loop.accelerator.gradient_state._set_sync_gradients(sync_gradients=True)
        loop.accelerator.backward(loop.network(batches[2][0]).square().mean())
        found.append(len(read_json_lines(records)))
    assert found == expected


def test_the_loops_own_numbers_stay_apart(tmp_path):
    """In TensorBoard each step has the loop's loss and the monitor's, under names that differ."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    loop = Loop(tmp_path, log_with="tensorboard")
    loop.train(logs=True)
    loop.accelerator.end_training()

    rows = tensorboard_rows(tmp_path / "logs")
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == pytest.approx(loop.losses)
    assert [row["mfwrap/loss"] for row in rows] == pytest.approx(loop.losses)


def test_an_anomaly_is_recorded_with_its_layer(tmp_path):
    """A non-finite gradient is skipped, and its record names the step."""
    loop = Loop(tmp_path, factors={4: NAN})
    loop.train()
    loop.monitor.close()

    [anomaly, *_] = read_json_lines(tmp_path / "run" / "anomalies.jsonl")
    assert anomaly["step"] == 3
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    assert [row["skipped"] for row in rows] == [0, 0, 1, 0]
    assert math.isnan(rows[2]["loss"])


def test_the_first_step_can_be_replayed(tmp_path):
    """The monitor begins with the first call of the network, which it records, too."""
    loop = Loop(tmp_path, replay=True)
    inputs = torch.randn(1, 2, 4)
    inputs[0, 1, 3] = NAN
    loop.train([[inputs], [inputs.nan_to_num()]])
    loop.monitor.close()
    (anomaly,) = read_json_lines(tmp_path / "run" / "anomalies.jsonl")

    assert (anomaly["step"], anomaly["cause"]) == (1, "data")
    assert (anomaly["where"], anomaly["micro_batch"]) == ("input", 0)


@pytest.mark.parametrize("name", ["labels", "1"])
@pytest.mark.parametrize("is_attached", [True, False])
def test_targets_that_the_network_does_not_get(tmp_path, name, is_attached):
    """They are named with their rows, once the loop gives its batches; healthy ones are not."""
    loop = Loop(tmp_path / "attached", replay=True)
    network, optimizer, monitor = loop.network, loop.optimizer, loop.monitor
    if not is_attached:
        network = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        monitor = LoopMonitor(optimizer, tmp_path / "plain" / "run", model=network, replay=True)
    for number in range(6):
        with loop.accelerator.accumulate(network):
            inputs, targets = torch.randn(3, 4), torch.randn(3, 1)
            if number == 5:
                targets[1] = NAN
            loss = (network(inputs) - targets).square().mean()
            batch = {"inputs": inputs, name: targets}
            monitor.note_batch(batch if name == "labels" else (inputs, targets))
            loop.accelerator.backward(loss) if is_attached else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.end_step() if is_attached else monitor.end_step(loss)
    monitor.close()
    (folder,) = tmp_path.glob("*/run")
    (anomaly,) = read_json_lines(folder / "anomalies.jsonl")

    assert anomaly["step"] == (3 if is_attached else 6)
    assert (anomaly["cause"], anomaly["name"], anomaly["rows"]) == ("data", name, [1])


_FAILING = """
import sys
import torch
from mfwrap.callbacks import LoopMonitor

network = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
monitor = LoopMonitor(optimizer, "run", model=network)
for step in range(3):
    loss = network(torch.ones(2)).square().sum()
    loss.backward()
    optimizer.step()
    monitor.end_step(loss)
if sys.argv[1] == "error":
    raise ZeroDivisionError
"""


@pytest.mark.parametrize(
    ("how", "state"), [("error", "failed after step 3 (ZeroDivisionError)"), ("end", "finished")]
)
def test_an_error_that_ends_the_program(tmp_path, how, state):
    """A monitor that nobody closes tells how its loop has ended."""
    command = [sys.executable, "-c", _FAILING, how]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())

    assert ended.returncode == (1 if how == "error" else 0)
    assert facts["state"] == state


@pytest.mark.parametrize("is_context", [True, False])
def test_an_error_of_a_loop(tmp_path, is_context):
    """The file names the error that has ended the loop, by its type and its message."""
    loop = Loop(tmp_path)
    finish = contextlib.nullcontext if is_context else loop.accelerator.end_training

    def train():
        with loop.monitor if is_context else contextlib.nullcontext():
            try:
                loop.train(list(loop.loader)[:4])
                torch.ones(2) @ torch.ones(3)
            finally:
                finish()

    with pytest.raises(RuntimeError):
        train()
    facts = json.loads((tmp_path / "run" / "run.json").read_text())

    assert facts["state"] == "failed after step 2 (RuntimeError)"
    assert facts["error"].startswith("RuntimeError: inconsistent tensor size")


def test_a_loop_that_answers_an_error(tmp_path):
    """An error from before the loop has not ended it."""
    loop = Loop(tmp_path)
    try:
        {}["missing"]
    except KeyError:
        loop.train(list(loop.loader)[:2])
        loop.monitor.close()

    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "finished"


def test_a_checkpoint_restores_records_and_states(tmp_path):
    """After ``load_state`` the records of later steps are gone, and the steps go on from there."""
    straight = Loop(tmp_path / "straight")
    straight.train()
    straight.monitor.close()
    first = Loop(tmp_path / "stopped")
    batches = list(first.loader)
    first.train(batches[:4])
    first.accelerator.save_state(tmp_path / "checkpoint")
    first.train(batches[4:6])
    first.monitor.close()
    second = Loop(tmp_path / "stopped")
    second.accelerator.load_state(tmp_path / "checkpoint")
    second.train(batches[4:])
    second.monitor.close()

    for name in ("training_state.jsonl", "metrics.csv"):
        texts = [(tmp_path / one / "run" / name).read_text() for one in ("straight", "stopped")]
        assert texts[0].replace('"epoch": 1, ', "") == texts[1].replace('"epoch": 1, ', "")


def test_a_second_run_in_the_folder_keeps_the_first(tmp_path):
    """All files of the first run are renamed, with the same warning; the new ones have one run."""
    for _ in range(2):
        loop = Loop(tmp_path, factors={4: NAN}, callbacks=[LocalNormMonitor()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.train()
        loop.monitor.close()

    run = tmp_path / "run"
    renamed = [line for line in (str(one.message) for one in caught) if "earlier run" in line]
    files = {file.name for file in run.iterdir()} - {LIST}
    new = {name for name in files if not name.endswith(".1")}
    assert len(renamed) == len(new) == 7
    assert len({*renamed}) == 1  # Python shows equal words once
    assert files == new | {f"{name}.1" for name in new}
    assert (run / "metrics.csv").read_text() == (run / "metrics.csv.1").read_text()


OTHER_LOOP = """
import os, sys, torch
from torch import nn
from mfwrap import MFTrainOneStepCell, WithLossCell
from mfwrap.callbacks import LoopMonitor
network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
monitor = LoopMonitor(cell, sys.argv[1])
for _ in range(2):
    cell(torch.ones(4, 2), torch.ones(4, 1))
    monitor.end_step()
monitor.flush()
if sys.argv[2:] == ["worker"] and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("began", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_loop(tmp_path):
    """Start a loop in another program that writes the folder ``run`` until it is killed."""
    with contextlib.ExitStack() as stack:

        def start(*words):
            program = stack.enter_context(Program(OTHER_LOOP, tmp_path / "run", *words))
            assert program.stdout.readline() == "began\n"
            return program

        yield start


def contents(folder):
    """Return the names and bytes of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_loop_in_the_folder_of_another_program(tmp_path, other_loop):
    """It is refused before it writes; the other loop's files stay as they are."""
    other_loop()
    before = contents(tmp_path / "run")
    loop = Loop(tmp_path)

    with pytest.raises(
        BlockingIOError, match=r"run is in use: process \d+ on .* has been writing it"
    ):
        loop.train()
    loop.monitor.close()

    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("words", [(), ("worker",)])
def test_a_loop_after_a_killed_one(tmp_path, other_loop, words):
    """The folder of a killed loop is free, also while a forked data worker of it lives."""
    program = other_loop(*words)
    program.kill()

    with pytest.warns(UserWarning, match="records of an earlier run"):
        Loop(tmp_path).train()


def test_a_loop_in_the_place_of_an_older_one(tmp_path):
    """A new monitor ends the one of a loop that has failed, and writes its own records."""
    older = Loop(tmp_path)
    older.train(list(older.loader)[:4])
    newer = Loop(tmp_path)
    with pytest.warns(UserWarning, match="records of an earlier run"):
        newer.train()
    with pytest.raises(BlockingIOError, match="another LoopMonitor of this program"):
        older.train()
    newer.monitor.close()

    run = tmp_path / "run"
    assert [row["step"] for row in rows_of(run / "metrics.csv")] == [1, 2, 3, 4]
    assert [row["step"] for row in rows_of(run / "metrics.csv.1")] == [1, 2]
    assert not (run / RUN_LOCK).exists()


def test_two_loops_in_one_folder(tmp_path):
    """The second of two loops that train at the same time is refused."""
    first, second = Loop(tmp_path), Loop(tmp_path)
    first.train()
    with pytest.raises(BlockingIOError, match="give each loop a folder of its own"):
        second.train()
    first.monitor.close()

    assert [row["step"] for row in rows_of(tmp_path / "run" / "metrics.csv")] == [1, 2, 3, 4]


@pytest.mark.parametrize("new", ["nothing", "optimizer", "model"])
def test_a_monitor_that_is_made_twice(tmp_path, new):
    """A notebook's cell that makes the monitor may be run again before the loop begins."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    first = LoopMonitor(optimizer, tmp_path, model=network)
    if new == "model":
        network = nn.Sequential(network)
    if new == "optimizer":
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with LoopMonitor(optimizer, tmp_path, model=network) as second:
        for _ in range(2):
            loss = network(torch.ones(4, 2)).square().mean()
            loss.backward()
            optimizer.step()
            second.end_step(loss)
    first.close()

    assert [row["step"] for row in rows_of(tmp_path / "metrics.csv")] == [1, 2]
    assert not list(tmp_path.glob("*.1"))


def test_a_loop_after_its_folder_was_deleted(tmp_path, caplog):
    """An older monitor that cannot write its last records any more does not end the new loop."""
    older = Loop(tmp_path)
    older.train()
    shutil.rmtree(tmp_path / "run")
    newer = Loop(tmp_path)
    newer.train()
    newer.monitor.close()

    assert "The last records of an older loop in" in caplog.text
    assert [row["step"] for row in rows_of(tmp_path / "run" / "metrics.csv")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.csv", "run.json", "progress.jsonl", "training_state.jsonl"),
        *("anomalies.jsonl", "_mfwrap.lock"),
    ],
)
def test_files_of_somebody_else_stay(tmp_path, name):
    """A loop that would replace or continue them is refused, and names them."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text('{"step": 9}\n')
    loop = Loop(tmp_path)

    with pytest.raises(FileExistsError, match=re.escape(name)):
        loop.train()

    assert (tmp_path / "run" / name).read_text() == '{"step": 9}\n'
    loop.monitor.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


def test_a_resumed_loop_of_an_earlier_release(tmp_path):
    """Its CSV file is listed at the first resume, so that a second one may replace it, too."""
    for first_step in (0, 4, 8):
        if first_step == 4:
            (tmp_path / "run" / LIST).unlink()
        loop = Loop(tmp_path, first_step=first_step)
        loop.train()
        loop.monitor.close()

    assert [row["step"] for row in rows_of(tmp_path / "run" / "metrics.csv")] == [*range(1, 13)]


def test_all_monitors_know_the_batch_size(tmp_path, caplog):
    """`global_batch_size` is that of the own monitor and of each further one."""
    clock = Clock()
    loop = Loop(
        tmp_path,
        global_batch_size=8,
        throughput_baseline=2.0,
        clock=clock,
        callbacks=[MFLossMonitor(clock=clock)],
    )
    for batch in loop.loader:
        clock.now += 1.0
        loop.train([batch])
    loop.monitor.close()

    [*_, record] = read_json_lines(tmp_path / "run" / "training_state.jsonl")
    assert record["throughput_linearity"] == 8 / 2.0 / 2.0
    assert "4.00000 samples/s/p" in caplog.text
    assert "batch size is unknown" not in caplog.text


def test_all_monitors_know_how_the_batch_grows(tmp_path, caplog):
    """A `BatchGrowth` gives each update its own number of samples."""
    growth, clock = BatchGrowth({0: 2, 1: 6, 3: 8}, 8), Clock()
    network = WithLossCell(nn.Linear(4, 1), nn.MSELoss())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
    cell = MFTrainOneStepCell(network, optimizer)
    monitor = LoopMonitor(
        cell,
        tmp_path,
        global_batch_size=growth,
        throughput_baseline=2.0,
        clock=clock,
        callbacks=[MFLossMonitor(clock=clock)],
    )
    for update in range(4):
        clock.now += 1.0
        number = growth.size(update) // 2
        cell.step([(torch.ones(2, 4), torch.ones(2, 1)) for _ in range(number)])
        monitor.end_step()
    monitor.close()

    records = read_json_lines(tmp_path / "training_state.jsonl")
    shown = re.findall(r"([\d.]+) samples/s/p", caplog.text)
    # The time of the first update is unknown.
    assert [record.get("throughput_linearity") for record in records] == [None, 3.0, 3.0, 4.0]
    assert [float(each) for each in shown][1:] == [6.0, 6.0, 8.0]


def test_the_norm_without_clipping(tmp_path):
    """A limit that no norm reaches gives the norm and clips nothing; without one there is none."""
    norms = []
    for settings in ({}, {"use_clip_grad": True, "max_grad_norm": 1e30}):
        network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
        with torch.no_grad():
            for weight in network.parameters():
                weight.fill_(100.0)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0, fused=True)
        cell = MFTrainOneStepCell(network, optimizer, **settings)
        folder = tmp_path / str(len(norms))
        with LoopMonitor(cell, folder) as monitor:
            cell(torch.ones(4, 2), torch.ones(4, 1))
            monitor.end_step()
        [row] = rows_of(folder / "metrics.csv")
        norms.append(row.get("global_norm"))
        loss = network(torch.ones(4, 2), torch.ones(4, 1))
        gradients = [g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]

    assert norms == [None, pytest.approx(torch.cat(gradients).norm().item())]
    assert norms[1] > 100


def test_a_checkpoint_of_two_ranks(two_ranks, tmp_path):
    """After a resume on two ranks, the files of each rank have each step once, in order."""
    results = two_ranks.run(resume_monitored_loop, str(tmp_path))

    run = tmp_path / "run"
    steps = list(range(1, NUM_UPDATES + 1))
    for name, losses in zip(
        ("training_state.jsonl", "training_state_rank1.jsonl"), results, strict=True
    ):
        records = read_json_lines(run / name)
        assert [one["step"] for one in records] == steps
        assert [one["loss"] for one in records] == losses
    rows = rows_of(run / "metrics.csv")
    assert [one["step"] for one in rows] == steps
    assert [one["loss"] for one in rows] == results[0]
    assert results[0] != results[1]
    assert not list(run.glob("metrics*rank*"))  # the trackers, too, get the main process only


def test_a_cell_has_its_records(tmp_path):
    """A loop around a cell needs the same two lines, and other monitors find the run folder."""
    network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, local_norm=True)
    losses = []
    with LoopMonitor(cell, tmp_path, callbacks=[LocalNormMonitor()]) as monitor:
        for _ in range(3):
            losses.append(cell(torch.ones(4, 2), torch.ones(4, 1)).loss.item())
            monitor.end_step()

    assert [row["loss"] for row in rows_of(tmp_path / "metrics.csv")] == losses
    assert len(read_json_lines(tmp_path / "local_norms.jsonl")) == 3
    assert cell.before_update == []


def test_a_plain_loop_gives_its_loss(tmp_path):
    """In a loop of torch alone the loop gives loss and norm, and the rate is the optimizer's."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.25)
    logged = []
    with LoopMonitor(
        optimizer,
        tmp_path,
        model=network,
        trackers=lambda values, step: logged.append((step, values)),
        prefix="own/",
    ) as monitor:
        for number in (1.0, 2.0):
            loss = network(torch.ones(1, 2)).square().sum() * number
            loss.backward()
            norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step(loss, grad_norm=norm)

    assert [step for step, _ in logged] == [1, 2]
    assert logged[1][1]["own/loss"] == pytest.approx(loss.item())
    assert logged[1][1]["own/global_norm"] == pytest.approx(norm.item())
    assert logged[1][1]["own/learning_rate"] == 0.25


def test_the_last_step_is_written_when_the_program_ends(tmp_path):
    """A monitor that nobody closes writes its last step at the end of the program."""
    loop = Loop(tmp_path)
    loop.train()
    records = tmp_path / "run" / "training_state.jsonl"
    assert len(read_json_lines(records)) == NUM_STEPS - 1
    loop.monitor._at_exit()
    assert len(read_json_lines(records)) == NUM_STEPS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_that_ends(tmp_path):
    """What is pending is written by the process that has made the monitor, and by no other."""
    loop = Loop(tmp_path)
    loop.train()
    child = os.fork()
    if child == 0:
        loop.monitor._at_exit()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(read_json_lines(tmp_path / "run" / "training_state.jsonl")) == NUM_STEPS - 1


def test_what_a_loop_must_not_give(tmp_path):
    """A wrong step, tracker, callback or loss is one sentence."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="`step` must be what `attach` returned"):
        LoopMonitor(network, tmp_path)
    with pytest.raises(TypeError, match="`trackers` must hold"):
        LoopMonitor(optimizer, tmp_path, trackers=[3])
    with pytest.raises(TypeError, match="`callbacks` must hold"):
        LoopMonitor(optimizer, tmp_path, callbacks=[print])
    with pytest.raises(ValueError, match="`global_batch_size` must be >= 0, got -1"):
        LoopMonitor(optimizer, tmp_path, global_batch_size=-1)
    with pytest.raises(ValueError, match="`loss` must be given"):
        LoopMonitor(optimizer, tmp_path).end_step()
    loop = Loop(tmp_path)
    with pytest.raises(ValueError, match="`loss` must be left out"):
        loop.monitor.end_step(1.0)
    with pytest.raises(ValueError, match="must be that of 1 monitors, got 0"):
        loop.monitor.load_state_dict({"global_step": 1, "callbacks": []})


def test_a_state_is_json(tmp_path):
    """The state of a monitor survives JSON, and continues at its step."""
    loop = Loop(tmp_path)
    loop.train()
    loop.monitor.flush()
    state = json.loads(json.dumps(loop.monitor.state_dict()))
    assert state["global_step"] == NUM_STEPS

    other = Loop(tmp_path / "other")
    other.monitor.load_state_dict(state)
    assert other.monitor.global_step == NUM_STEPS


def test_the_accelerators_trackers_may_start_later(tmp_path):
    """Trackers that ``init_trackers`` starts after the monitor was made get the records, too."""
    loop = Loop(tmp_path)
    tracker = TensorBoardTracker("later", tmp_path)
    tracker.start()
    loop.accelerator.trackers = [tracker]
    loop.train()
    loop.accelerator.end_training()

    assert [row["_step"] for row in tensorboard_rows(tmp_path / "later")] == [1, 2, 3, 4]


def test_a_copy_of_the_network_is_a_stock_network(tmp_path):
    """At any moment it has no hooks, can be saved, and does nothing to the monitor."""
    found = []
    for copies in (False, True):
        folder = tmp_path / str(copies)
        loop = Loop(folder, replay=True, fingerprints=True, max_attention_logit_format="jsonl")

        def use_copies(network):
            for made in (copy.deepcopy(network), copied_by_saving(network)):
                hooks = [
                    hook
                    for module in made.modules()
                    for name, value in vars(module).items()
                    if name.endswith(("hooks", "kwargs", "called"))
                    for hook in value
                ]
                assert hooks == []
                made(torch.full((2, 4), NAN)).sum().backward()

        look = use_copies if copies else (lambda _: None)
        for [inputs] in loop.loader:
            with loop.accelerator.accumulate(loop.network):
                look(loop.network)
                loss = loop.network(inputs).square().mean()
                look(loop.network)
                loop.accelerator.backward(loss)
                look(loop.network)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            loop.monitor.end_step()
        recorder = loop.monitor._monitor._run.finder.recorder
        found.append([len(recorder.last_step), len(recorder._this_step)])
        loop.monitor.close()
        found[-1].append(read_json_lines(folder / "run" / "training_state.jsonl"))
        found[-1].append(read_json_lines(folder / "run" / "fingerprints.jsonl"))
    assert found[0] == found[1]


def copied_by_saving(network):
    """Save a network with its class, and load it."""
    torch.save(network, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_two_optimizers_of_one_update(tmp_path):
    """The weights before an update are those before its first optimizer: no note, no anomaly."""
    torch.manual_seed(0)
    accelerator = new_accelerator()
    attached = attach(accelerator, StepConfig(local_norm=True))
    network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    first = torch.optim.AdamW(network[0].parameters(), lr=0.01, fused=True)
    second = torch.optim.SGD(network[1:].parameters(), lr=0.01, fused=True)
    network, first, second = accelerator.prepare(network, first, second)
    with LoopMonitor(attached, tmp_path) as monitor:
        for number in range(8):
            accelerator.backward(network(torch.randn(5, 4)).square().mean())
            if number > 4:
                second.step()
            first.step()
            if number <= 4:
                second.step()
            first.zero_grad()
            second.zero_grad()
            monitor.end_step()

    anomalies = tmp_path / "anomalies.jsonl"
    assert not anomalies.exists() or read_json_lines(anomalies) == []
