"""Planted faults are found where they were planted, and good steps raise no alarm."""

import math
import types
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from mfwrap import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell, MFTrainOneStepCell, Model
from mfwrap.callbacks import LoopMonitor, TrainingStateMonitor
from mfwrap.callbacks.culprit.anomaly_log import Anomaly
from mfwrap.callbacks.culprit.finder import CulpritFinder
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.shared.step_values import StepNumbers, StepValues, numbers_of
from mfwrap.tensors.norm_groups import group_parameters
from mfwrap.trainer import MFTrainer
from support.planted_faults import KINDS, check_record, random_faults
from support.ranks.trainers import ROWS, Line
from support.spoilt.blocks import Fault, records_of, train_blocks


def judged(finder, step=1, *, names=(), norms=None, moved=False, **values) -> Anomaly | None:
    """Let a finder judge a step with these numbers."""
    known = {"loss": 1.0, "overflow": False, "global_norm": None, "skipped": False, **values}
    applied = torch.tensor(not known["skipped"])
    norm = known["global_norm"]
    output = types.SimpleNamespace(
        loss=torch.tensor(known["loss"]),
        global_norm=None if norm is None else torch.tensor(norm),
        local_norm=norms,
    )
    report = types.SimpleNamespace(
        local_norm_names=names, learning_rates=torch.zeros(0), learning_rate_factor=1.0
    )
    judgement = finder.judges.end_step(step, output, report, applied)
    numbers = StepNumbers(
        step=step, **{"loss_scale": None, "consecutive_skips": int(known["skipped"]), **known}
    )
    scores = StepScores(*judgement.summary.tolist())
    return finder.judge(numbers, judgement, scores, weights_have_moved=moved)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 20))]
)
def test_planted_faults(seed, tmp_path):
    """The records name step, rank, layer, micro-batch and rows of the planted faults."""
    faults = [fault for _, fault in random_faults(seed)]
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    train_blocks(monitor, faults, num_steps=30)
    records = records_of(tmp_path)

    assert monitor.num_scale_overflows == 0
    # A weight that has blown up spoils all later steps, so compare the steps up to the blow-up.
    first = {record["step"]: record for record in reversed(records)}
    blow_up = faults[-1].step if faults[-1].kind == "blow-up" else 99
    assert [step for step in sorted(first) if step <= blow_up] == [f.step for f in faults]
    for fault in faults:
        check_record(first[fault.step], fault)


def test_a_second_fault_that_is_smaller_than_the_first(tmp_path):
    """What a fault with a known cause has done is not the noise in which the next one is lost."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=2, n_positions=16)
    network = GPT2LMHeadModel(config).train()
    weight = network.transformer.h[0].mlp.c_fc.weight
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    with LoopMonitor(cell, tmp_path) as monitor:
        for step in range(1, 45):
            if step == 20:
                with torch.no_grad():
                    network.transformer.wte.weight *= 20
            if step == 26:
                with torch.no_grad():
                    network.transformer.wte.weight /= 20
            if step == 40:
                hook = weight.register_hook(lambda gradient: 20 * gradient)
            rows = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))
            cell(input_ids=rows, labels=rows)
            monitor.end_step()
            if step == 40:
                hook.remove()

    begun = [one for one in records_of(tmp_path) if "explanation" in one and one["kind"] != "note"]
    assert [(one["step"], one["cause"]) for one in begun] == [
        (20, "weight_changed"),
        (40, "gradient"),
    ]


@pytest.mark.parametrize(("sign", "causes"), [(-1, ["diverged"]), (1, [])])
def test_a_loss_with_a_wrong_sign_from_the_first_step_on(tmp_path, sign, causes):
    """It falls without end, and is called diverged once it is far below any ordinary loss."""
    torch.manual_seed(0)
    first, middle, last = (torch.nn.Linear(*sizes) for sizes in ((8, 32), (32, 32), (32, 4)))
    network = torch.nn.Sequential(first, torch.nn.ReLU(), middle, torch.nn.ReLU(), last)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02)
    with LoopMonitor(optimizer, tmp_path, model=network) as monitor:
        for step in range(200):
            rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            loss = sign * torch.nn.functional.cross_entropy(network(rows), (rows[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.end_step(loss)

    ends = [one for one in records_of(tmp_path) if "diverged" in one]
    assert [one["cause"] for one in ends] == causes
    assert all(one["kind"] == "loss_drop" and "wrong sign" in one["suggestion"] for one in ends)


@pytest.mark.parametrize("is_by_code", [True, False])
def test_a_module_that_computes_something_else_for_good(tmp_path, is_by_code):
    """It is named by a call of an earlier step, unless the loop has changed its weights."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=2, n_positions=16)
    network = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    with LoopMonitor(cell, tmp_path, replay=True) as monitor:
        for step in range(1, 34):
            if step == 30 and is_by_code:
                network.transformer.wpe.register_forward_hook(lambda *args: -9 * args[-1])
            elif step == 30:
                with torch.no_grad():
                    network.transformer.wpe.weight *= -9
            start = torch.randint(64, (4, 1), generator=torch.Generator().manual_seed(step))
            rows = (start + torch.arange(16)) % 64
            cell(input_ids=rows, labels=rows)
            monitor.end_step()

    begun = [one for one in records_of(tmp_path) if "explanation" in one and one["kind"] != "note"]
    found = (begun[0]["step"], begun[0]["cause"], begun[0]["name"])
    if is_by_code:
        assert found == (30, "activation", "transformer.wpe")
    else:
        assert found[:2] == (30, "weight_changed")


def test_rows_of_each_step_of_an_episode(tmp_path, caplog):
    """Bad rows of several steps in a row are all named, while those of each step stand out."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=2, n_positions=16)
    network = GPT2LMHeadModel(config).train()

    def spoil(_module, inputs, output):
        return output.masked_fill((inputs[0] == 63)[..., None], math.nan)

    network.transformer.wte.register_forward_hook(spoil)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    bad = {20: [1], 21: [3], 22: [0, 1, 2, 3], 23: [2]}
    with LoopMonitor(cell, tmp_path, replay=True) as monitor:
        for step in range(1, 30):
            rows = torch.randint(63, (4, 16), generator=torch.Generator().manual_seed(step))
            rows[bad.get(step, []), 5] = 63
            cell(input_ids=rows, labels=rows)
            monitor.end_step()
    first, end = (one for one in records_of(tmp_path) if one["kind"] != "note")

    assert [row["row"] for row in first["samples"]] == bad[20]
    assert (end["last_step"], end["num_steps"], end["num_searched"]) == (23, 4, 3)
    # All rows of step 22 are alike, as with ruined weights, so the next step is not searched.
    assert [(row["step"], row["row"]) for row in end["later_samples"]] == [(21, 3)]
    said = "4 updates skipped; samples of later steps: step 21, row 3 of micro-batch 0 on rank 0"
    assert said in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_replay(kind, tmp_path):
    """Without a replay, a record names the layer of a backward fault, not of a forward fault."""
    fault = Fault(25, kind, block=1)
    train_blocks(TrainingStateMonitor(folder=tmp_path), [fault], num_steps=26)
    (record,) = records_of(tmp_path)

    check_record(record, fault, replayed=False)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 10))]
)
def test_clean_runs(seed, tmp_path):
    """Warm-up, clipping and a loss scale that is too high are not recorded as anomalies."""
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    scale = DynamicLossScaleUpdateCell(2.0**70, 2, 3)
    train_blocks(monitor, num_steps=45, num_micro_batches=1, seed=seed, scale=scale)

    assert records_of(tmp_path) == []
    # The scale falls from 2**70 until the squares of scaled gradients fit into float32. Then it
    # rises after every third step and overflows again.
    assert monitor.num_scale_overflows > 10


@pytest.mark.parametrize("step", [3, 25])
def test_a_fault_while_the_scale_is_high_but_not_too_high(step, tmp_path):
    """A high loss scale does not hide a gradient that is NaN for another reason."""
    fault = Fault(step, "weight gradient", block=2)
    monitor = TrainingStateMonitor(folder=tmp_path)
    train_blocks(monitor, [fault], scale=DynamicLossScaleUpdateCell(2.0**30, 2, 1000))

    assert [record["step"] for record in records_of(tmp_path)] == [step]
    assert monitor.num_scale_overflows == 0


@pytest.mark.parametrize("replay", [False, True])
def test_a_fault_while_the_scale_is_nearly_too_high(replay, tmp_path):
    """The size of the scale would explain the NaN, but something else was non-finite first."""
    fault = Fault(25, "gradient", block=2)
    monitor = TrainingStateMonitor(folder=tmp_path, replay=replay)
    train_blocks(monitor, [fault], scale=DynamicLossScaleUpdateCell(2.0**61, 2, 1000))

    assert [record["step"] for record in records_of(tmp_path)] == [25] * replay
    assert monitor.num_scale_overflows == (not replay)


def test_a_scale_that_does_not_fall_explains_nothing_in_the_long_run(tmp_path):
    """The steps of a diverged run are one episode, and only the first is replayed."""
    faults = [Fault(step, "activation", block=0) for step in range(22, 27)]
    train_blocks(
        TrainingStateMonitor(folder=tmp_path, replay=True),
        faults,
        scale=FixedLossScaleUpdateCell(2.0**16),
    )
    records = records_of(tmp_path)

    first, end = records
    assert (first["step"], first["consecutive_skips"], first["is_replay_exact"]) == (22, 1, True)
    assert end == {
        "step": 22,
        "kind": "loss_not_finite",
        "last_step": 26,
        "num_steps": 5,
        "num_skipped": 5,
    }


def test_a_weight_that_spoils_the_loss(tmp_path):
    """Without a replay, the record names a weight that has grown until the loss overflows."""

    class BlowUp(TrainerCallback):
        def on_step_begin(self, _args, state, *_, model, **__):
            if state.global_step == 24:
                model.blocks[2].linear.weight.data *= 1e25

    monitor = TrainingStateMonitor(folder=tmp_path)
    train_blocks(monitor, callbacks=[BlowUp()], num_steps=25)
    (record,) = records_of(tmp_path)

    assert (record["step"], record["kind"]) == (25, "loss_not_finite")
    assert (record["layer"], record["where"]) == ("blocks.2", "weight")
    assert record["name"] == record["weights"][0]["name"] == "blocks.2.linear.weight"
    assert "is_replay_exact" not in record


@pytest.mark.parametrize("factor", [0.5, -1.0, 3.0, 1e3, 1e15, 1e25])
@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step"])
def test_a_finite_weight_is_not_called_non_finite(factor, event, tmp_path, caplog):
    """Whatever a finite weight has been multiplied by, no line says that it is non-finite."""

    def change(_args, state, *_, model, **__):
        if state.global_step == 24:
            weight = model.blocks[2].linear.weight.data
            weight *= factor
            assert weight.isfinite().all()

    changes = TrainerCallback()
    setattr(changes, event, change)
    train_blocks(TrainingStateMonitor(folder=tmp_path), callbacks=[changes], num_steps=25)

    lines = [line.getMessage() for line in caplog.records if line.name.startswith("mfwrap")]
    assert lines or abs(factor) < 1
    for text in [*lines, *(str(record.get("explanation")) for record in records_of(tmp_path))]:
        assert "non-finite elements" not in text


def test_usual_norms_go_on_after_a_resume(tmp_path):
    """A resumed run restores the usual norms, so it detects a spike right after the resume."""
    first = TrainingStateMonitor(folder=tmp_path / "first")
    optimizer: dict[str, Any] = {}
    network = train_blocks(first, num_steps=25, optimizer_state=optimizer)
    later = TrainingStateMonitor(folder=tmp_path / "later")
    resumed = {"saved_run": first.state()["attributes"]["saved_run"], "optimizer_state": optimizer}
    fault = Fault(27, "blow-up", block=3)
    train_blocks(later, [fault], network=network, first_step=26, num_steps=28, **resumed)
    record = records_of(tmp_path / "later")[0]

    check_record(record, fault, replayed=False)
    known = [group["usual_norm"] for group in record["gradients"]]
    assert all(usual > 0 for usual in known)
    assert 0 < record["usual_global_norm"] < record["global_norm"] / 10


def test_overflows_in_a_row_across_a_resume(tmp_path):
    """Right after a resume, the second of two overflows in a row is not replayed, either."""
    faults = [Fault(number, "data") for number in (6, 7)]
    whole = TrainingStateMonitor(folder=tmp_path / "whole", replay=True)
    train_blocks(whole, faults, num_steps=7)
    first = TrainingStateMonitor(folder=tmp_path / "parts", replay=True)
    network = train_blocks(first, faults, num_steps=6)
    state = first.state()["attributes"]["saved_run"]
    later = TrainingStateMonitor(folder=tmp_path / "parts", replay=True)
    train_blocks(later, faults, network=network, saved_run=state, first_step=7, num_steps=7)

    for name in ("whole", "parts"):
        replayed = ["is_replay_exact" in record for record in records_of(tmp_path / name)]
        assert replayed == [True, False]


def test_without_local_norms(tmp_path, caplog):
    """Without local norms a record has no layer, and one warning says how to get the layer."""
    monitor = TrainingStateMonitor(folder=tmp_path)
    train_blocks(monitor, [Fault(25, "weight gradient")], local_norm=False)
    (record,) = records_of(tmp_path)
    said = [r.getMessage() for r in caplog.records if "cannot show" in r.getMessage()]

    assert (record["step"], "layer" in record) == (25, False)
    assert said == [
        (
            "TrainingStateMonitor cannot show the layer of an anomaly: it needs "
            "mfwrap's step with StepConfig(local_norm=True), in a recipe runner_wrapper.local_norm"
        )
    ]


def test_a_replay_needs_no_local_norms(tmp_path, caplog):
    """It finds the layer of a value that is not finite, so nothing is missing."""
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    train_blocks(monitor, [Fault(25, "activation", block=3)], local_norm=False)
    (record,) = records_of(tmp_path)

    assert (record["step"], record["layer"]) == (25, "blocks.3")
    assert "cannot show" not in caplog.text


def test_a_loop_without_the_event_before_the_optimizer(tmp_path):
    """Without ``on_pre_optimizer_step`` the record says that the replay used later weights."""
    fault = Fault(25, "activation", block=3, micro_batch=1)
    train_blocks(
        TrainingStateMonitor(folder=tmp_path, replay=True), [fault], sends_pre_optimizer_step=False
    )
    (record,) = records_of(tmp_path)

    assert (record["name"], record["micro_batch"]) == ("blocks.3", 1)
    assert record["is_replay_exact"] is False


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_a_loss_of_one_rank(loss):
    """A step with a non-finite loss is recorded, and its finite norm adds to the usual norm."""
    finder = CulpritFinder(None, spike_factor=2.0, limit=1e19)
    found = [
        judged(finder, step, loss=loss, global_norm=norm)
        for step, norm in enumerate([2.0] * 25 + [500.0], start=1)
    ]
    kinds = [None if anomaly is None else anomaly.kind for anomaly in found]

    expected = [None] * 25 + ["spike"] if loss == 1.0 else ["loss_not_finite"] * 26
    assert kinds == expected
    assert found[-1].usual_global_norm == pytest.approx(2.0)


class Offset(torch.nn.Module):
    """Network whose loss has a term without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, inputs, bad):
        """Return the loss."""
        return self.linear(inputs).square().mean() + bad.detach()


def test_a_jump_of_the_rate_comes_before_the_loss(tmp_path):
    """The rate is the cause of the non-finite loss."""
    network = Offset()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001)

    class Batches:
        """Eight batches; with the last one, the rate jumps and the loss is NaN."""

        def __len__(self):
            return 8

        def __iter__(self):
            for number in range(8):
                is_last = number == 7
                optimizer.param_groups[0]["lr"] = 0.1 if is_last else 0.001
                yield torch.ones(2, 2), torch.tensor(float("nan") if is_last else 0.0)

    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True)
    Model(cell).train(1, Batches(), callbacks=TrainingStateMonitor(folder=tmp_path))
    (record,) = records_of(tmp_path)
    assert (record["step"], record["kind"]) == (8, "learning_rate_spike")


@pytest.mark.parametrize(("rate", "momentum"), [(0.8, 0.9), (0.3, 0.9), (0.1, 0.9), (2.0, 0.0)])
def test_a_rate_that_is_too_high_for_sgd(tmp_path, rate, momentum):
    """Its updates grow with the gradients: neither the optimizer nor a backward is at fault."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 1),
    )
    inputs = torch.randn(40, 16, 8)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum)
    with LoopMonitor(optimizer, folder=tmp_path, model=network, replay=True) as monitor:
        for batch in inputs:
            loss = (network(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step(loss=loss)
    records = records_of(tmp_path)
    causes = [record.get("cause") for record in records]

    assert not records[0].get("samples"), "the weights of the step are gone"
    assert causes[0] == "learning_rate"
    assert not {"optimizer_state", "gradient", "loss"} & set(causes)


class SumOfFeatures(torch.nn.Module):
    """A perceptron that returns the loss of predicting the sum of the features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, features):
        """Return the loss."""
        targets = features.clamp(-5, 5).sum(1, keepdim=True)
        return {"loss": torch.nn.functional.mse_loss(self.layers(features), targets)}


@pytest.mark.parametrize("is_bad", [True, False])
def test_rows_of_a_step_whose_update_has_ruined_the_weights(tmp_path, is_bad):
    """They cannot be run again: one with a far larger input is named by that, and no other."""
    network = SumOfFeatures()
    batches = torch.randn(24, 16, 8)
    if is_bad:
        batches[15, 4] = 1e4
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01 if is_bad else 3.0)
    with LoopMonitor(optimizer, folder=tmp_path, model=network, replay=True) as monitor:
        for batch in batches:
            loss = network(batch)["loss"]
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step(loss=loss, grad_norm=norm)
    first = records_of(tmp_path)[0]

    if is_bad:
        assert (first["step"], first["cause"]) == (16, "data")
        assert [(sample["micro_batch"], sample["row"]) for sample in first["samples"]] == [(0, 4)]
        assert first["samples_detail"].startswith("rows whose `features` is more than 10 times")
    else:
        assert first["cause"] == "learning_rate"
        assert "samples" not in first
        assert "the update of the step has changed the weights too far" in first["samples_detail"]


class LogOffset(Offset):
    """Adds a logarithm to the loss."""

    def forward(self, inputs, bad):
        """Return the loss."""
        return super().forward(inputs, bad.log())


@pytest.mark.parametrize("is_input", [False, True])
def test_a_loss_that_is_not_finite_alone_is_not_replayed(tmp_path, caplog, is_input):
    """A non-finite loss with finite gradients is not replayed, and its record names no module."""
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    network = Offset() if is_input else LogOffset()
    before = network.linear.weight.detach().clone()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    Model(cell).train(
        1, [(torch.ones(2, 2), torch.tensor(math.nan if is_input else -1.0))], callbacks=monitor
    )
    (record,) = records_of(tmp_path)

    assert (record["step"], record["kind"], record["skipped"]) == (1, "loss_not_finite", False)
    assert not record.keys() & {"layer", "is_replay_exact"}
    assert record["cause"] == ("data" if is_input else "loss")
    if is_input:
        assert (record["where"], record["name"]) == ("input", "bad")
        assert "micro-batch 0: input `bad` is non-finite" in caplog.text
    else:
        assert not record.keys() & {"where", "name"}
        assert "micro-batch 0: the outputs of all modules of the network are finite" in caplog.text
        assert "all gradients are finite, a replay is not possible after" in caplog.text
    assert not torch.equal(network.linear.weight, before)


class Spoilt(torch.nn.Module):
    """Two layers whose loss is spoilt where a call says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, inputs, spoilt=None):
        """Return the loss."""
        hidden = self.first(inputs)
        if spoilt == "output":
            hidden = hidden + math.nan
        loss = self.last(hidden).square().mean()
        return {"zero": loss * 0 + math.inf, "term": loss + math.inf}.get(spoilt, loss)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("spoilt", ["zero", "term"])
def test_a_loss_that_is_infinite(tmp_path, spoilt, is_plain):
    """It is the loss's fault, also if all gradients are zero, or if the loop reports no norm."""
    network = Spoilt()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    given = {"step": optimizer, "model": network} if is_plain else {"step": cell}
    with LoopMonitor(folder=tmp_path, replay=True, **given) as monitor:
        for step in range(1, 21):
            batch = (torch.randn(8, 4), spoilt if step == 15 else None)
            if not is_plain:
                cell(*batch)
                monitor.end_step()
                continue
            optimizer.zero_grad()
            loss = network(*batch)
            loss.backward()
            optimizer.step()
            monitor.end_step(loss=loss)
    (record,) = [each for each in records_of(tmp_path) if each["step"] == 15]

    assert record["kind"] == "loss_not_finite"
    assert (record["cause"], record["ranks"]) == ("loss", [0])
    assert (
        record["explanation"]
        == "the outputs of all modules of the network are finite, the loss is not"
    )


def test_outputs_that_are_not_finite_in_a_loop_without_norms(tmp_path):
    """The update has ruined the weights, so nobody knows where it began."""
    network = Spoilt()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with LoopMonitor(optimizer, tmp_path, model=network, replay=True) as monitor:
        for step in range(1, 21):
            optimizer.zero_grad()
            loss = network(torch.randn(8, 4), "output" if step == 15 else None)
            loss.backward()
            optimizer.step()
            monitor.end_step(loss=loss)
    record, *_ = [each for each in records_of(tmp_path) if each["step"] == 15]

    assert record["kind"] == "loss_not_finite"
    assert record["cause"] == "unknown"
    assert "explanation" not in record


def test_a_micro_batch_without_targets_is_named():
    """Its loss is NaN and its gradients are zero: no replay is needed to name the micro-batch."""

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, inputs, labels, indices):
            return torch.nn.functional.cross_entropy(self.linear(inputs), labels)

    recorder = StepRecorder(Classifier())
    for labels, indices in (([0, 2], [5, 1]), ([-100, -100], [4, 7])):
        batch = (torch.ones(2, 4), torch.tensor(labels), torch.tensor(indices))
        recorder.network(*batch).backward()
    recorder.end_step()
    finder = CulpritFinder(recorder.network, spike_factor=2.0, limit=1e19, recorder=recorder)
    found = judged(finder, loss=math.nan, global_norm=1.0, moved=True)

    assert (found.where, found.name, found.layer) == ("targets", "labels", None)
    assert (found.micro_batch, found.indices) == (1, (4, 7))
    assert "micro-batch 1: the micro-batch has no targets, all of `labels` is" in str(found)


def test_a_weight_that_has_grown_is_named_instead_of_the_module_behind_it(tmp_path):
    """The replay finds the module that overflows; the record names the weight that has grown."""

    class BlowUp(TrainerCallback):
        def on_step_begin(self, _args, state, *_, model, **__):
            if state.global_step == 24:
                model.blocks[1].linear.weight.data *= 1e30

    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    train_blocks(monitor, callbacks=[BlowUp()], num_steps=25)
    (record,) = records_of(tmp_path)

    assert (record["where"], record["name"]) == ("weight", "blocks.1.linear.weight")
    assert (record["layer"], record["replay"]) == ("blocks.1", "reproduced")


class _Spoiling(MFTrainer):
    def compute_loss(self, model, inputs, return_outputs=None, **kwargs):
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        return loss * math.nan if self.state.global_step == 3 else loss


def test_a_fault_outside_of_the_network_that_is_in_no_row(tmp_path):
    """The rows are run by the Trainer's own loss, and none is named."""
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    _Spoiling(Line(), arguments, train_dataset=ROWS, callbacks=[monitor]).train()
    (record,) = records_of(tmp_path)

    assert (record["step"], record["replay"]) == (4, "not_covered")
    assert "samples" not in record
    assert record["samples_detail"].startswith("rows were run one by one: none of 8 stands alone")


class _Linear(torch.nn.Linear):
    def forward(self, inputs, labels=None):
        return super().forward(inputs)


class _SpoilingOne(MFTrainer):
    number = 0

    def compute_loss(self, model, inputs, return_outputs=None, **kwargs):
        """Spoil the eleventh micro-batch, the second of step 4."""
        self.number += 1
        loss = model(**inputs).square().mean()
        return loss * math.nan if self.number == 11 else loss


def test_the_micro_batch_of_a_fault_outside_of_the_network(tmp_path):
    """The Trainer's loss of each micro-batch tells which one is not finite."""
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    _SpoilingOne(_Linear(2, 3), arguments, train_dataset=ROWS, callbacks=[monitor]).train()
    (record,) = records_of(tmp_path)

    assert (record["step"], record["cause"], record["micro_batch"]) == (4, "loss", 1)


@pytest.mark.parametrize(("rate", "is_found"), [(0.3, True), (0.001, False)])
def test_a_rate_that_is_too_high_from_the_first_update_on(rate, is_found):
    """The first update is far larger than the weights, and the next ones are not."""
    network = torch.nn.Linear(64, 64)
    torch.nn.init.normal_(network.weight, std=0.02)
    torch.nn.init.normal_(network.bias, std=0.02)
    finder = CulpritFinder(network, spike_factor=2.0, limit=1e30)
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    found = []
    for step in (1, 2):
        finder.judges.begin_step(step)
        network(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        found.append(judged(finder, step))
    assert found[0] is None
    assert (found[1] is not None) == is_found
    if found[1] is not None:
        assert (found[1].kind, found[1].cause) == ("update_spike", "learning_rate")


def test_monitoring_changes_nothing(tmp_path):
    """The weights of a training with replays are bitwise equal to those without replays."""
    faults = [Fault(10, "activation", block=1), Fault(14, "gradient", block=2)]
    watching = TrainingStateMonitor(folder=tmp_path, replay=True)
    watched = train_blocks(watching, faults, num_steps=16)
    plain = train_blocks(TrainingStateMonitor(find_culprit=False), faults, num_steps=16)

    assert len(records_of(tmp_path)) == 2
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def small_networks() -> dict[str, torch.nn.Module]:
    """Return small transformers models with different patterns of parameter names, by type."""
    vocabulary = {"vocab_size": 8, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    vit = ViTConfig(image_size=4, patch_size=2, intermediate_size=8, **sizes)
    gpt2 = GPT2Config(**vocabulary, n_positions=4, n_embd=8, n_layer=2, n_head=2)
    llama = LlamaConfig(
        **vocabulary, intermediate_size=8, num_key_value_heads=2, tie_word_embeddings=False, **sizes
    )
    return {
        "vit": ViTForImageClassification(vit),
        "gpt2": GPT2LMHeadModel(gpt2),
        "llama": LlamaForCausalLM(llama),
    }


def layer_blamed_for(network, names, bad) -> str | None:
    """Return the layer that a finder names when the gradient norm of one group is NaN."""
    finder = CulpritFinder(network, spike_factor=2.0, limit=1e19)
    norms = torch.ones(len(names))
    norms[bad] = float("nan")
    bad = {"overflow": True, "global_norm": math.nan, "skipped": True}
    return judged(finder, names=names, norms=norms, **bad).layer


@pytest.mark.parametrize("kind", ["vit", "gpt2", "llama"])
def test_the_layer_is_the_one_that_the_step_groups_by(kind):
    """For every parameter, the finder and ``local_norm_groups="layer"`` name the same layer."""
    network = small_networks()[kind]
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    groups = group_parameters(sizes, "layer", torch.device("cpu"))
    expected = {
        list(sizes)[index]: layer
        for layer, row in zip(groups.names, groups.members.tolist(), strict=True)
        for index in row
        if index < len(sizes)
    }
    found = {name: layer_blamed_for(network, tuple(sizes), i) for i, name in enumerate(sizes)}

    assert found == expected
    layers = set(found.values())
    assert kind != "vit" or "vit.embeddings" in layers


@pytest.mark.parametrize("kind", ["vit", "gpt2", "llama"])
def test_a_group_that_is_a_layer_is_its_own_layer(kind):
    """With ``local_norm_groups="layer"``, the name of the group is the layer."""
    network = small_networks()[kind]
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    names = group_parameters(sizes, "layer", torch.device("cpu")).names

    assert [layer_blamed_for(network, names, i) for i in range(len(names))] == list(names)


def test_a_buffer_that_a_skipped_step_has_ruined():
    """An overflow names the buffers that its forward has made non-finite, once."""
    network = torch.nn.BatchNorm1d(1)
    finder = CulpritFinder(network, spike_factor=2.0, limit=65504.0)
    network(torch.tensor([[1.0], [math.nan]]))
    bad = {"overflow": True, "global_norm": math.nan, "loss_scale": 2.0**16, "skipped": True}

    first, second = (judged(finder, step, **bad) for step in (1, 2))

    assert first.buffers == ("running_mean", "running_var")
    # No usual norm is known yet, so the loss scale explains the second overflow.
    assert second is None


@pytest.mark.parametrize(("later", "cause"), [(50.0, "diverged"), (2.0, "unknown")])
def test_an_anomaly_after_a_divergence(later, cause):
    """It follows from the ruined weights, unless the loss has come back since."""
    finder = CulpritFinder(None, spike_factor=2.0, limit=1e19)
    known = {"cause": "learning_rate", "usual_loss": 2.0, "ranks": (0,), "layer": None}
    finder.episodes.add(Anomaly(step=2, kind="spike", **known), 60.0, is_shared=False)
    for step in range(3, 100):
        numbers = numbers_of(step, StepValues(loss=50.0 if step < 9 else later))
        finder.episodes.watch(numbers)
        finder.episodes.pass_over(numbers)
    found = judged(finder, 100, overflow=True, skipped=True, global_norm=math.nan)

    assert (found.kind, found.cause) == ("gradient_not_finite", cause)
    assert (found.explanation == "it follows the divergence of step 2") is (cause == "diverged")


@pytest.mark.parametrize(("has_diverged", "kind"), [(True, None), (False, "loss_drop")])
def test_a_loss_on_its_way_back(has_diverged, kind):
    """After a divergence, a loss that falls is no fault, though it is far below those before."""
    finder = CulpritFinder(None, spike_factor=2.0, limit=1e19)
    for step in range(1, 40):
        if has_diverged and step == 20:
            known = {"cause": "learning_rate", "usual_loss": 2.0, "ranks": (0,), "layer": None}
            finder.episodes.add(Anomaly(step=20, kind="spike", **known), 1200.0, is_shared=False)
        numbers = numbers_of(step, StepValues(loss=1200.0 + step % 3))
        finder.episodes.watch(numbers)
        assert judged(finder, step, loss=numbers.loss) is None
        finder.episodes.pass_over(numbers)
    found = judged(finder, 40, loss=300.0)

    assert (None if found is None else found.kind) == kind
