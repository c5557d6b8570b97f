"""A bit that is flipped in one of two runs of a step is named; the training does not change."""

import logging
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerControl, TrainerState, set_seed

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import LoopMonitor, RecomputeCheck, TrainingStateMonitor
from mfwrap.records.json_lines import read_json_lines
from mfwrap.report.page import write_run_page
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.recomputed import Fault, bfloat16, drawn_faults, found_on_ranks, run, train
from support.small_llama import byte_batch, small_llama
from support.spoilt.blocks import records_of
from support.trainer_runs import new_trainer, tiny_llama

PLACE = ("step", "ranks", "where", "name", "micro_batch")


def anomalies(folder):
    """Return the records of anomalies of both ranks, without notes, by step."""
    found = [one for rank in range(2) for one in records_of(folder, rank) if one["kind"] != "note"]
    return sorted(found, key=lambda one: one["step"])


def notes(folder):
    """Return the notes of rank 0."""
    return [one for one in records_of(folder) if one["kind"] == "note"]


def places(records):
    """Return the fields that name the place of a fault."""
    return [{key: record.get(key) for key in PLACE} for record in records]


def expected(faults):
    """Return the fields that records of faults must have."""
    return [fault.place for fault in faults]


# Faults


def test_fifty_faults_are_named(tmp_path):
    """Of 50 flipped bits, each in a step of its own, all have the right rank, module and tensor."""
    faults = drawn_faults(50, seed=1)
    run(tmp_path, faults)
    found = anomalies(tmp_path)

    assert places(found) == expected(faults)
    assert {one["kind"] for one in found} == {"recompute_differs"}
    assert notes(tmp_path) == []
    assert {fault.run for fault in faults} == {0, 1}
    assert {fault.kind for fault in faults} == {
        *("output", "weight", "gradient of output", "gradient of weight")
    }


@pytest.mark.parametrize("layout", ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow)])
def test_the_rank_with_the_fault_is_named(layout, two_ranks, tmp_path):
    """On two ranks the rank names itself, the other one is silent, and the training is the same."""
    number = 10
    same = two_ranks.run(found_on_ranks, str(tmp_path), layout, number)
    kinds = ("output", "gradient of output") if layout == "FSDP2" else ()
    faults = drawn_faults(number, seed=2, num_ranks=2, kinds=kinds)

    assert places(anomalies(tmp_path)) == expected(faults)
    assert {fault.rank for fault in faults} == {0, 1}
    for rank in range(2):
        assert all(one["ranks"] == [rank] for one in records_of(tmp_path, rank))
    assert all(map(all, same))
    assert len(same[0]) > 100


@pytest.mark.parametrize(
    ("run_at_fault", "verdict", "resumes"),
    [
        (0, "the repetitions agree, so the step itself and its update are wrong", True),
        (1, "the step agrees with most repetitions, so its update is right", False),
    ],
)
def test_three_runs_vote(run_at_fault, verdict, resumes, tmp_path):
    """With two repetitions the run that is wrong is known, and so whether the update was."""
    fault = Fault(4, "output", "model.layers.0.mlp.down_proj", run=run_at_fault, bit=22)
    run(tmp_path, [fault], repeats=2)
    (found,) = anomalies(tmp_path)

    assert found["explanation"].startswith(
        "the output of model.layers.0.mlp.down_proj differs between 3 runs of the step from the "
        "same state, with "
    )
    assert found["explanation"].endswith(f" of the tensors that are computed later; {verdict}")
    assert ("resume from a checkpoint" in found["suggestion"]) == resumes
    odd, *others = sorted(found["fingerprints"], key=found["fingerprints"].count)
    assert found["fingerprints"].index(odd) == run_at_fault
    assert len(set(others)) == 1
    assert found["layer"] == "model.layers.0"
    assert found["num_groups"] > 10


def test_two_runs_do_not_vote(tmp_path):
    """With one repetition the record says that it is unknown which run is wrong."""
    run(tmp_path, [Fault(4, "output", "lm_head")])
    (found,) = anomalies(tmp_path)

    assert found["explanation"].endswith("; it is unknown which of them is right")
    assert found["device"].startswith("cpu on ")
    assert found["suggestion"].startswith(f"take {found['device']} of rank 0 out and test it")


@pytest.mark.parametrize("step", [1, 2])
def test_a_fault_in_a_measured_step_is_no_property_of_the_program(step, tmp_path):
    """A fault in one of the steps that are measured is named, and blinds nothing afterwards."""
    faults = [
        Fault(step, "output", "model.layers.0.input_layernorm", run=2),
        Fault(3, "output", "model.layers.0.self_attn.q_proj"),
    ]
    run(tmp_path, faults)

    assert places(anomalies(tmp_path)) == expected(faults)
    assert notes(tmp_path) == []


def test_the_page_and_the_log_name_the_device(tmp_path, caplog):
    """The page shows rank, device and tensor, and what to do; the log has one line."""
    with caplog.at_level(logging.WARNING, logger="mfwrap"):
        run(tmp_path, [Fault(3, "gradient of output", "model.layers.0.mlp.gate_proj")])
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    write_run_page([tmp_path], tmp_path / "page.html")
    page = re.sub(r"<[^>]+>", "", (tmp_path / "page.html").read_text("utf-8"))
    (found,) = anomalies(tmp_path)

    assert "recomputation differs" in page
    assert "silent data corruption" in page
    assert "gradient of model.layers.0.mlp.gate_proj" in page
    assert f"take {found['device']} of rank 0 out" in page
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "step 3: recomputation differs in layer model.layers.0 on rank 0, micro-batch 0: "
        "the gradient of the output of model.layers.0.mlp.gate_proj differs between 2 runs"
    )


# Programs that are not deterministic


class Noisy(nn.Module):
    """Add noise from a generator of its own, between two blocks."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.noise = Noise()
        self.after = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.after(self.noise(self.before(inputs))).square().mean()


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs):
        return inputs + 1e-3 * torch.randn(inputs.shape, generator=self.generator)


def rows(step, micro_batch):
    """Return a micro-batch of random rows."""
    generator = torch.Generator().manual_seed(10 * step + micro_batch)
    return {"inputs": torch.randn(4, 8, generator=generator)}


def small(folder, network, faults=(), num_steps=5, **settings):
    """Train a network of 8 numbers with a check in each step."""
    check = None if folder is None else RecomputeCheck(1, folder=folder)
    settings = {"batch": rows, "loss_of": lambda output: output, **settings}
    return train(check, network, num_steps, faults=faults, **settings)


def test_noise_is_named_once_and_accused_never(tmp_path):
    """What is not deterministic is in one note; only what comes before it is judged."""
    torch.manual_seed(0)
    faults = [Fault(4, "output", "before.0"), Fault(5, "output", "after")]
    small(tmp_path, Noisy(), faults, num_steps=8)
    (note,) = notes(tmp_path)

    assert note["step"] == 1
    assert note["explanation"].startswith(
        "the output of noise differs when a step is run again from the same state, with "
    )
    assert note["explanation"].endswith(
        "judges neither these tensors nor what is computed from them"
    )
    assert places(anomalies(tmp_path)) == [faults[0].place]


class Unordered(nn.Module):
    """Compute with a weight whose gradient is not deterministic, and stays within the weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(1)
        self.second.weight.register_hook(
            lambda gradient: gradient + 1e-3 * torch.rand(gradient.shape, generator=generator)
        )

    def forward(self, inputs):
        return self.second(self.first(inputs)).square().mean()


def test_behind_the_gradient_of_a_weight_is_judged(tmp_path):
    """Nothing is computed from a weight's gradient, so one as of atomics blinds nothing else."""
    torch.manual_seed(0)
    faults = [Fault(4, "gradient of weight", "first"), Fault(5, "output", "second")]
    small(tmp_path, Unordered(), faults)
    (note,) = notes(tmp_path)

    assert note["explanation"].startswith("the gradient of second.weight differs when")
    assert places(anomalies(tmp_path)) == expected(faults)


class Outside(nn.Module):
    """A head that the loop uses outside of the forward, too."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, inputs):
        return self.head(self.first(inputs))


def test_what_the_loop_computes_itself_is_told_apart(tmp_path):
    """A gradient of which the loop computes a part outside of the network is not accused."""
    torch.manual_seed(0)
    network, faults = Outside(), [Fault(4, "output", "first")]
    small(
        tmp_path,
        network,
        faults,
        loss_of=lambda output: output.square().mean() + network.head.weight.square().sum(),
    )
    (note,) = notes(tmp_path)

    assert note["explanation"].startswith("the gradient of head.weight differs when")
    assert places(anomalies(tmp_path)) == expected(faults)


def test_one_checked_step_does_not_tell(tmp_path):
    """If a training ends after one checked step, what differs is noted and not accused."""
    torch.manual_seed(0)
    small(tmp_path, Noisy(), [Fault(1, "output", "before.0", run=2)], num_steps=1)
    (note,) = notes(tmp_path)

    assert note["name"] == "before.0"
    assert anomalies(tmp_path) == []


# The training is the same


class Everything(nn.Module):
    """All that a second forward could change: buffers, and every generator of random numbers."""

    def __init__(self, *, reentrant=None):
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.inner, self.last = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)), nn.Linear(8, 1)
        self.register_buffer("count", torch.zeros(()))
        self._reentrant = reentrant

    def forward(self, inputs):
        values = functional.dropout(self.norm(self.drop(self.first(inputs))), 0.1) + drawn()
        self.count = self.count + 1  # a new tensor in the place of the buffer
        if self._reentrant is None:
            values = self.inner(values)
        else:
            values = checkpoint(self.inner, values, use_reentrant=self._reentrant)
        return self.last(values).square().mean() * (1 + self.count)


def drawn():
    """Draw from Python's and NumPy's global generators."""
    return random.random() + float(np.random.rand())  # noqa: NPY002, S311  (the global generators)


def seeded(make, **arguments):
    """Make a network after all global generators have been seeded."""
    set_seed(0)
    return make(**arguments)


def assert_same(found, without):
    """Compare two lists of tensors bit by bit."""
    assert len(found) == len(without)
    assert all(torch.equal(a, b) for a, b in zip(found, without, strict=True))


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({}, {}),
        ({"reentrant": False}, {}),
        ({"reentrant": True}, {}),
        ({}, {"around_forward": bfloat16}),
    ],
    ids=["plain", "checkpointing", "reentrant checkpointing", "autocast"],
)
def test_a_training_is_bitwise_the_same(arguments, settings, tmp_path):
    """Losses, gradients, weights, buffers and random states are those without the check."""
    found = small(tmp_path, seeded(Everything, **arguments), **settings)
    after = [torch.rand(()), torch.tensor(drawn())]
    without = small(None, seeded(Everything, **arguments), **settings)
    after_without = [torch.rand(()), torch.tensor(drawn())]

    assert_same([*found, *after], [*without, *after_without])
    assert records_of(tmp_path) == []


def test_faults_in_checkpointed_modules_are_named(tmp_path):
    """The forward that the backward repeats is compared, too."""
    faults = [Fault(4, "output", "inner.0"), Fault(5, "gradient of weight", "inner.0", run=1)]
    small(tmp_path, seeded(Everything, reentrant=False), faults)

    assert places(anomalies(tmp_path)) == expected(faults)


def by_cell(folder, callbacks):
    """Train with a cell; return its outputs and the weights."""
    network = seeded(small_llama)
    cell = MFTrainOneStepCell(
        network,
        torch.optim.AdamW(network.parameters(), 1e-2),
        use_clip_grad=True,
        local_norm=True,
        scale_sense=1024.0,
        gradient_accumulation_steps=2,
    )
    outputs = []
    with LoopMonitor(cell, folder, callbacks=callbacks, fingerprints=True, replay=True) as monitor:
        for step in range(5):
            outputs.append(cell(**byte_batch([9, 7, 5, 8], start=20 * step)))
            monitor.end_step()
    values = [value for output in outputs for value in (output.loss, output.local_norm)]
    return [*values, *network.parameters()]


def by_attached_loop(folder, callbacks):
    """Train with an attached loop; return its outputs and the weights."""
    accelerator = new_accelerator("fp16", gradient_accumulation_steps=2)
    attached = attach(accelerator, StepConfig(local_norm=True, use_clip_grad=True))
    network = seeded(small_llama)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(network, optimizer)
    outputs = []
    with LoopMonitor(attached, folder, callbacks=callbacks, fingerprints=True) as monitor:
        for number in range(10):
            with accelerator.accumulate(model):
                batch = byte_batch([9, 7], start=20 * number)
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            monitor.end_step()
            outputs.append(attached.last_output)
    values = [one for output in outputs[1::2] for one in (output.loss, output.global_norm)]
    return [*values, *network.parameters()]


def by_trainer(folder, callbacks, kind=MFTrainer):
    """Train with `MFTrainer`; return the logged losses and the weights."""
    monitor = TrainingStateMonitor(folder=folder, fingerprints=True, replay=kind is MFTrainer)
    trainer = new_trainer(
        kind,
        folder,
        model=seeded(tiny_llama),
        callbacks=[*callbacks, monitor],
        extras={"step": StepConfig(local_norm=True)} if kind is MFTrainer else None,
        max_steps=5,
    )
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return [*map(torch.tensor, losses), *trainer.model.parameters()]


def by_stock_trainer(folder, callbacks):
    """Train with transformers' Trainer."""
    return by_trainer(folder, callbacks, Trainer)


@pytest.mark.parametrize("way", [by_cell, by_attached_loop, by_trainer, by_stock_trainer])
def test_each_way_is_bitwise_the_same(way, tmp_path):
    """So are trainings with mfwrap's step, whose other monitors record the same, too."""
    found = way(tmp_path / "with", [RecomputeCheck(1, folder=tmp_path / "with")])
    without = way(tmp_path / "without", [])

    assert_same(found, without)
    assert anomalies(tmp_path / "with") == []
    files = [tmp_path / name / "fingerprints.jsonl" for name in ("with", "without")]
    first, second = map(read_json_lines, files)
    assert len(first) == 6
    assert [one.get("micro_batches") for one in first] == [
        one.get("micro_batches") for one in second
    ]


@pytest.mark.parametrize("way", [by_cell, by_attached_loop, by_trainer])
def test_each_way_finds_a_fault(way, tmp_path, monkeypatch):
    """A bit flipped in the forward of the seventh of the calls of a step's module is named."""
    calls = []
    norm = type(small_llama().model.norm)

    def flipped(module, *arguments, forward=norm.forward):
        output = forward(module, *arguments)
        if module is getattr(flipped, "module", module):
            flipped.module = module
            calls.append(None)
            if len(calls) == flipped.at:
                output.data.view(torch.int32).view(-1)[3] ^= 4
        return output

    # The first norm of the network runs once in each run of a micro-batch.
    flipped.at = 10**9
    monkeypatch.setattr(norm, "forward", flipped)
    way(tmp_path / "counted", [RecomputeCheck(1, folder=tmp_path / "counted")])
    total = len(calls)
    calls.clear()
    del flipped.module
    flipped.at = total  # the last call is one of the second run of the last step
    way(tmp_path / "found", [RecomputeCheck(1, folder=tmp_path / "found")])

    assert len(calls) == total
    (found,) = anomalies(tmp_path / "found")
    assert (found["step"], found["where"]) == (5, "activation")
    assert found["name"] == "model.layers.0.input_layernorm"


def test_steps_between_checks_have_no_hooks(tmp_path):
    """Only a checked step is followed; afterwards no hook is left, whatever the loop does."""
    check, network = RecomputeCheck(3, folder=tmp_path), small_llama()
    state, control = TrainerState(), TrainerControl()
    check.on_train_begin(None, state, control, model=network)

    def hooks():
        return sum(
            len(one._forward_hooks) + len(one._forward_pre_hooks) for one in network.modules()
        )

    numbers = []
    for step in range(4):
        state.global_step = step
        check.on_step_begin(None, state, control, model=network)
        numbers.append(hooks())
    check.on_train_end(None, state, control)

    assert numbers[:2] == [0, 0]
    assert numbers[2] > 0
    assert numbers[3] == hooks() == 0


# What cannot be done twice


class Compiled(nn.Module):
    """A module with the name of the module inside that ``torch.compile`` gives."""

    def __init__(self):
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: None, "the loop passes no `model`"),
        (lambda: nn.Sequential(Compiled()), "the network is compiled"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(2)), "a SyncBatchNorm shares its statistics"),
    ],
    ids=["no model", "compiled", "SyncBatchNorm"],
)
def test_a_network_that_cannot_be_run_again(model, reason, tmp_path):
    """The check refuses it at the begin, in one sentence."""
    check = RecomputeCheck(folder=tmp_path)
    with pytest.raises(ValueError, match=f"RecomputeCheck cannot run the steps again: {reason}"):
        check.on_train_begin(None, TrainerState(), TrainerControl(), model=model())


class Unused(nn.Module):
    """Return a loss beside the output that the loop trains."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs):
        output = self.layer(inputs)
        return {"loss": output.mean(), "output": output}


def of_two_calls(output):
    """Return a loss of two calls of the network."""
    return (output["loss"] * NETWORKS[-1](rows(1, 1)["inputs"])["loss"]).mean()


def of_two_backwards(output):
    """Run a backward before that of the loop."""
    output["output"].mean().backward(retain_graph=True)
    return output["loss"]


NETWORKS = []


@pytest.mark.parametrize("loss_of", [of_two_calls, of_two_backwards])
def test_a_step_that_cannot_be_run_again(loss_of, tmp_path, caplog):
    """A backward that does not begin with one call's loss ends the checks with one warning."""
    torch.manual_seed(0)
    NETWORKS.append(Unused())
    with caplog.at_level(logging.WARNING, logger="mfwrap"):
        small(tmp_path, NETWORKS[-1], loss_of=loss_of)

    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "RecomputeCheck cannot run the steps again: each call of the network must have a backward "
        "of its own"
    )
    assert records_of(tmp_path) == []


class Popping(Unused):
    """Take the inputs out of the batch, and fail in a repetition if asked to."""

    def __init__(self, *, fails=False):
        super().__init__()
        self.num_calls, self._fails = 0, fails

    def forward(self, batch):
        self.num_calls += 1
        if self._fails and self.num_calls > 2:
            msg = "no third call"
            raise LookupError(msg)
        return super().forward(batch["nested"].pop("inputs"))


def in_dictionaries(step, micro_batch):
    """Return a micro-batch of random rows in a dictionary in a dictionary."""
    return {"batch": {"nested": rows(step, micro_batch)}}


def test_a_forward_that_empties_its_batch(tmp_path):
    """Each repetition has containers of its own."""
    torch.manual_seed(0)
    network, faults = Popping(), [Fault(4, "output", "layer")]
    small(tmp_path, network, faults, batch=in_dictionaries, loss_of=returned_loss)

    assert places(anomalies(tmp_path)) == expected(faults)
    assert network.num_calls == 2 * (6 + 6 + 3 * 2)


def test_a_repetition_that_fails(tmp_path, caplog):
    """An error in it ends the checks with one warning, and the training goes on."""
    found = []
    for folder in (tmp_path, None):
        torch.manual_seed(0)
        network = Popping(fails=folder is not None)
        settings = {"batch": in_dictionaries, "loss_of": returned_loss, "num_steps": 1}
        with caplog.at_level(logging.WARNING, logger="mfwrap"):
            found.append(small(folder, network, **settings))

    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "RecomputeCheck cannot run the steps again: running one again raised LookupError: no third "
        "call"
    )
    assert_same(*found)


def returned_loss(output):
    """Return the loss that the network returns."""
    return output["loss"]


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, numbers):
        return self.layer(self.table(numbers)).square().mean()


def test_sparse_gradients(tmp_path):
    """The sparse gradient of a weight is not compared; everything else is."""
    torch.manual_seed(0)
    network = Sparse()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with LoopMonitor(optimizer, tmp_path, model=network, callbacks=[RecomputeCheck(1)]) as monitor:
        for _ in range(4):
            loss = network(torch.arange(5))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step(loss.detach())

    assert network.table.weight.grad is None
    assert records_of(tmp_path) == []


# What belongs to the loop


class Prompted(nn.Module):
    """Add a trained tensor that is no parameter of the network to the inputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.prompts = []

    def forward(self, inputs):
        return self.layers(sum(self.prompts, inputs)).square().mean()


def leaf(network, prompt, encoder, inputs):
    """Call the network with a trained leaf."""
    return network(prompt)


def computed(network, prompt, encoder, inputs):
    """Call the network with what another network returns."""
    return network(torch.sigmoid(encoder(inputs)))


def attribute(network, prompt, encoder, inputs):
    """Put a trained leaf into an attribute of the network."""
    network.prompts = [prompt]
    return network(inputs)


@pytest.mark.parametrize("call", [leaf, computed, attribute])
def test_what_is_trained_outside_of_the_network(call, tmp_path):
    """Its gradients are those of the step alone, and the graph behind an input stays as it is."""
    trained = []
    for callbacks in ([RecomputeCheck(1)], []):
        torch.manual_seed(0)
        network, prompt, encoder = Prompted(), nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 8)
        weights = [*network.parameters(), prompt, *encoder.parameters()]
        optimizer = torch.optim.SGD(weights, 0.1)
        folder = tmp_path / str(len(callbacks))
        with LoopMonitor(optimizer, folder, model=network, callbacks=callbacks) as monitor:
            for step in range(4):
                loss = call(network, prompt, encoder, rows(step, 0)["inputs"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.end_step(loss.detach())
        assert records_of(folder) == []
        trained.append(weights)

    assert_same(*trained)


class Clamping(nn.Module):
    """Change the inputs in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.layer(inputs.clamp_(max=1.0)).square().mean()


BUFFER = torch.empty(4, 8)


def reused(step, micro_batch):
    """Return rows in the same tensor, as torch sees from the third step on."""
    (BUFFER if step >= 3 else BUFFER.data).copy_(rows(step, micro_batch)["inputs"])
    return {"inputs": BUFFER if step >= 3 else BUFFER.clone()}


def hidden(step, micro_batch):
    """Return rows in the same tensor, which torch does not see."""
    given = reused(1, micro_batch)["inputs"]
    BUFFER.data.copy_(rows(step, micro_batch)["inputs"])
    return {"inputs": BUFFER.detach() if step >= 3 else given}


@pytest.mark.parametrize(
    ("network", "batch", "step", "name"),
    [
        (Clamping, rows, 1, "input inputs"),
        (Outside, reused, 3, "input inputs"),
        (Outside, hidden, 3, "the input of the network"),
    ],
)
def test_an_input_that_the_program_changes(network, batch, step, name, tmp_path):
    """The step is not judged, a note says it once, and no device is accused."""
    torch.manual_seed(0)
    settings = {"loss_of": lambda output: output.square().mean()}
    found = small(tmp_path, network(), batch=batch, num_steps=6, **settings)
    torch.manual_seed(0)
    without = small(None, network(), batch=batch, num_steps=6, **settings)
    (note,) = records_of(tmp_path)

    assert (note["kind"], note["step"], note["cause"]) == ("note", step, "changed_in_step")
    assert note["explanation"].startswith(
        f"{name} was changed between the forward of the network and the update, by the forward or "
    )
    assert_same(found, without)


def test_weights_that_the_loop_changes_before_the_update(tmp_path):
    """A second optimizer that steps first, from the fourth step on, is no faulty device."""
    torch.manual_seed(0)
    network = Outside()
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in network.children())
    with LoopMonitor(first, tmp_path, model=network, callbacks=[RecomputeCheck(1)]) as monitor:
        for step in range(1, 7):
            loss = network(rows(step, 0)["inputs"]).square().mean()
            loss.backward()
            if step >= 4:
                second.step()
            first.step()
            network.zero_grad()
            monitor.end_step(loss.detach())
    (note,) = [one for one in records_of(tmp_path) if one.get("cause") == "changed_in_step"]

    assert anomalies(tmp_path) == []
    assert note["step"] == 4
    assert note["explanation"].startswith("head.weight was changed")


@pytest.mark.parametrize("halve", [False, True])
def test_a_term_of_the_loss_that_the_loop_adds(halve, tmp_path):
    """A gradient that another output gets from outside is repeated, also if it begins late."""
    calls = []

    def with_term(output):
        calls.append(None)
        loss = output["loss"]
        if halve:
            loss /= 2  # in place
        return loss + output["output"].abs().mean() * (len(calls) > 6)

    faults = [Fault(5, "output", "layer"), Fault(6, "gradient of output", "layer")]
    torch.manual_seed(0)
    found = small(tmp_path, Unused(), faults[:0], num_steps=6, loss_of=with_term)
    calls.clear()
    torch.manual_seed(0)
    without = small(None, Unused(), num_steps=6, loss_of=with_term)
    calls.clear()
    small(tmp_path / "faults", Unused(), faults, num_steps=6, loss_of=with_term)

    assert records_of(tmp_path) == []
    assert_same(found, without)
    assert places(anomalies(tmp_path / "faults")) == expected(faults)


def test_a_loss_beside_that_of_the_network(tmp_path):
    """A loop may train another loss than the one that the network returns."""
    torch.manual_seed(0)
    faults = [Fault(4, "gradient of output", "layer")]
    small(tmp_path, Unused(), faults, loss_of=lambda output: output["output"].square().mean())

    assert places(records_of(tmp_path)) == expected(faults)


def test_a_loop_without_the_event(tmp_path, caplog):
    """A loop that does not say when it updates gets one warning."""
    check, network = RecomputeCheck(1, folder=tmp_path), nn.Linear(2, 1)
    state, control = TrainerState(), TrainerControl()
    check.on_train_begin(None, state, control, model=network)
    with caplog.at_level(logging.WARNING, logger="mfwrap"):
        for step in range(3):
            check.on_step_begin(None, state, control, model=network)
            network(torch.ones(1, 2)).sum().backward()
            state.global_step = step + 1
            check.on_step_end(None, state, control, model=network)

    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("the loop does not send `on_pre_optimizer_step`")


def test_a_captured_step(tmp_path, caplog):
    """A step without a forward before its update, such as a captured one, ends the checks."""
    check, network = RecomputeCheck(1, folder=tmp_path), nn.Linear(2, 1)
    state, control = TrainerState(), TrainerControl()
    check.on_train_begin(None, state, control, model=network)
    with caplog.at_level(logging.WARNING, logger="mfwrap"):
        for _ in range(2):
            check.on_step_begin(None, state, control, model=network)
            check.on_pre_optimizer_step(None, state, control, model=network)

    (line,) = [record.getMessage() for record in caplog.records]
    assert "no forward pass was seen" in line


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"step_interval": 0}, ValueError, "`step_interval` must be >= 1, got 0"),
        ({"repeats": 0}, ValueError, "`repeats` must be >= 1, got 0"),
        ({"repeats": True}, TypeError, "`repeats` must be an int, got True"),
        ({"folder": 1}, TypeError, "`folder` must be a path or None, got 1"),
    ],
    ids=str,
)
def test_bad_arguments(settings, error, message):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=re.escape(message)):
        RecomputeCheck(**settings)
