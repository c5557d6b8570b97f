"""The training state monitor in MFTrainer, compared with numbers computed separately."""

import json
import math
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from mfwrap import StepConfig
from mfwrap.callbacks import (
    CheckpointMonitor,
    EMACallback,
    EvalCallback,
    MFLossMonitor,
    ReplicaCheck,
    TrainingStateMonitor,
)
from mfwrap.records.json_lines import read_json_lines
from mfwrap.trainer import MFTrainer
from support.host_reads import HostReads
from support.monitored_loop import Clock
from support.trainer_runs import Counting, new_trainer, tiny_llama, train

EVERYTHING = {
    "local_norm_format": "jsonl",
    "device_local_norm_format": "jsonl",
    "local_loss_format": "jsonl",
    "device_local_loss_format": "jsonl",
    "optimizer_state_format": "jsonl",
    "weight_state_format": "jsonl",
}


class Reference(TrainerCallback):
    """Compute the monitor's metrics from the tensors themselves, in float64."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_end(
        self, _args, state, _control, *, model, optimizer, step_output, step_report, **_
    ):
        """Compute the metrics of the step. A reference may synchronize with the device."""
        norms = dict(
            zip(step_report.local_norm_names, step_output.local_norm.tolist(), strict=True)
        )
        found = {f"local_norm/{name}": norm for name, norm in norms.items()}
        found["device_local_norm"] = math.sqrt(sum(norm**2 for norm in norms.values()))
        found["local_loss"] = found["device_accum_local_loss"] = step_output.loss.item()
        for name in ("loss", "learning_rate", "loss_scale", "global_norm", "overflow"):
            found[name] = getattr(step_output, name).item()
        found["skipped"] = step_report.skipped.item()
        found["consecutive_skips"] = step_report.consecutive_skips.item()
        states = optimizer.optimizer.state
        squares = 0.0
        for name, weight in model.named_parameters():
            squares += weight.detach().double().square().sum().item()
            for tag, key in (("adam_m_norm", "exp_avg"), ("adam_v_norm", "exp_avg_sq")):
                found[f"{tag}/{name}"] = states[weight][key].double().norm().item()
        found["weight_norm"] = math.sqrt(squares)
        self.steps.append({"step": state.global_step, **found})


def lines(folder):
    """Return the records in a run folder."""
    return read_json_lines(folder / "training_state.jsonl")


def trained(folder, monitor, *, kind=MFTrainer, callbacks=(), **arguments):
    """Train a tiny Llama with a monitor; in an MFTrainer its step has local norms."""
    extras = {"step": StepConfig(local_norm=True)} if kind is MFTrainer else None
    return train(
        new_trainer(kind, folder, callbacks=[monitor, *callbacks], extras=extras, **arguments)
    )


def test_every_number(tmp_path):
    """Losses and norms of gradients, moments and weights are right at every step."""
    reference = Reference()
    trained(tmp_path, TrainingStateMonitor(**EVERYTHING), callbacks=[reference])

    assert len(lines(tmp_path)) == len(reference.steps) == 4
    for record, expected in zip(lines(tmp_path), reference.steps, strict=True):
        assert record.pop("epoch") == 1
        assert record.pop("max_grad_norm", 1.0) == 1.0
        assert record == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("invert", [False, True])
def test_target(invert, tmp_path):
    """`target` selects parameters by name, `invert` the others; totals cover all parameters."""
    patterns = [r"layers\.0\.", "norm"]
    settings = {"target": patterns, "invert": invert, **EVERYTHING}
    reference = Reference()
    monitor = TrainingStateMonitor(**settings)
    trained(tmp_path, monitor, callbacks=[reference], max_steps=1)
    (record,) = lines(tmp_path)
    sums = {
        *("step", "device_local_norm", "local_loss", "device_accum_local_loss", "weight_norm"),
        *("loss", "learning_rate", "loss_scale", "global_norm", "overflow", "skipped"),
        "consecutive_skips",
    }
    expected = {
        tag: value
        for tag, value in reference.steps[0].items()
        if tag in sums or any(re.search(p, tag.split("/", 1)[1]) for p in patterns) is not invert
    }

    assert record.pop("epoch") == record.pop("max_grad_norm") == 1
    assert 10 < len(expected) < len(reference.steps[0])
    assert record == pytest.approx(expected, rel=1e-5)


def test_step_interval(tmp_path):
    """With `step_interval=3`, every third step is shown."""
    monitor = TrainingStateMonitor(device_local_norm_format="jsonl", step_interval=3)
    trained(tmp_path, monitor, max_steps=7)

    assert [record["step"] for record in lines(tmp_path)] == [3, 6]


def test_formats(tmp_path, caplog):
    """Each metric is written in its own formats, log lines in MindFormers' form."""
    monitor = TrainingStateMonitor(
        weight_state_format=["log", "tensorboard"],
        local_loss_format="log",
        device_local_norm_format="tensorboard",
        tensorboard_dir=tmp_path / "curves",
    )
    reference = Reference()
    trained(tmp_path, monitor, callbacks=[reference], max_steps=2)
    events = EventAccumulator(str(tmp_path / "curves"))
    events.Reload()
    logged = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Epoch")]
    pattern = r"Epoch:\[  1/  1\], step:\[    (\d)/    8\] (\S+): (\S+)"
    found = [re.fullmatch(pattern, line).groups() for line in logged]

    assert not (tmp_path / "training_state.jsonl").exists()
    assert set(events.Tags()["scalars"]) == {"weight_norm", "device_local_norm"}
    for tag in ("weight_norm", "device_local_norm"):
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [
            (step["step"], pytest.approx(step[tag], rel=1e-6)) for step in reference.steps
        ]
    assert [(step, tag) for step, tag, _ in found] == [
        (str(step), tag) for step in (1, 2) for tag in ("local_loss", "weight_norm")
    ]
    for (_, tag, text), step in zip(found[1::2], reference.steps, strict=True):
        assert float(text) == pytest.approx(step[tag], rel=1e-6)


def test_throughput_linearity(tmp_path):
    """At 16 samples per second and a baseline of 4, the throughput linearity is 4."""
    clock = Clock()

    class Seconds(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            clock.now += 0.5

    monitor = TrainingStateMonitor(
        throughput_baseline=4.0, local_loss_format="jsonl", clock=clock, step_interval=2
    )
    trained(tmp_path, monitor, callbacks=[Seconds()])

    assert [record["throughput_linearity"] for record in lines(tmp_path)] == [4.0, 4.0]


def test_print_struct(tmp_path, caplog):
    """All trainable parameters are logged, and the training ends after one step."""
    run = trained(tmp_path, TrainingStateMonitor(print_struct=True))
    logged = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]

    assert run.trainer.state.global_step == 1
    for name, weight in tiny_llama().named_parameters():
        assert f"{name} {tuple(weight.shape)}" in logged


def test_a_resumed_run_appends(tmp_path):
    """A resumed run appends to the file and continues the usual norms."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    whole, first, later = (TrainingStateMonitor(local_loss_format="jsonl") for _ in range(3))
    trained(tmp_path / "whole", whole, **settings)
    trained(tmp_path / "parts", first, **{**settings, "max_steps": 2})
    again = new_trainer(
        MFTrainer,
        tmp_path / "parts",
        callbacks=[later],
        extras={"step": StepConfig(local_norm=True)},
        **settings,
    )
    train(again, tmp_path / "parts" / "checkpoint-2")

    assert [record["step"] for record in lines(tmp_path / "parts")] == [1, 2, 3, 4]
    losses = [[r["local_loss"] for r in lines(tmp_path / name)] for name in ("whole", "parts")]
    # The run in "parts" first trained with a shorter schedule, so only the first two losses are
    # equal.
    assert losses[0][:2] == losses[1][:2]
    saved = json.loads((tmp_path / "parts" / "checkpoint-2" / "trainer_state.json").read_text())
    kept = saved["stateful_callbacks"]["TrainingStateMonitor"]["attributes"]["saved_run"]
    assert kept["finder"]["kinds"]["rates"]["num_updates"] == 2
    ended = later.state()["attributes"]["saved_run"]["finder"]
    assert ended["kinds"]["rates"]["num_updates"] == 4


def test_a_stock_trainer(tmp_path, caplog):
    """A stock Trainer shows weights and optimizer state; one warning names missing values."""
    monitor = TrainingStateMonitor(**EVERYTHING)
    run = trained(tmp_path, monitor, kind=Trainer)
    records = lines(tmp_path)
    said = [r.getMessage() for r in caplog.records if "cannot show" in r.getMessage()]
    norm = math.sqrt(sum(w.double().square().sum().item() for w in run.weights.values()))

    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["weight_norm"] == pytest.approx(norm, rel=1e-6)
    assert {tag.split("/")[0] for tag in records[0]} == {
        *("step", "epoch", "max_grad_norm", "adam_m_norm", "adam_v_norm", "weight_norm")
    }
    assert said == [
        (
            "TrainingStateMonitor cannot show local norms, losses and the layer of an anomaly: the "
            "loop passes no `step_output`"
        )
    ]


def test_a_resumed_stock_trainer(tmp_path):
    """With transformers' restore option, the monitor gets settings and state of the checkpoint."""
    settings = {"save_strategy": "steps", "save_steps": 2, "kind": Trainer}
    trained(
        tmp_path, TrainingStateMonitor(weight_state_format="jsonl"), **settings | {"max_steps": 2}
    )
    again = new_trainer(
        Trainer,
        tmp_path,
        callbacks=[TrainingStateMonitor()],
        restore_callback_states_from_checkpoint=True,
    )
    train(again, tmp_path / "checkpoint-2")
    (later,) = [c for c in again.callback_handler.callbacks if type(c) is TrainingStateMonitor]

    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3, 4]
    assert later.state()["attributes"]["saved_run"]["finder"]["kinds"]["rates"]["num_updates"] == 4


def test_an_overflow_of_a_stock_trainer(tmp_path):
    """A non-finite norm in the log is recorded as an anomaly of its step."""
    model = tiny_llama()
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    calls = iter(range(100))
    weight.register_hook(lambda gradient: gradient * (math.nan if next(calls) == 9 else 1.0))
    monitor = TrainingStateMonitor()
    trained(tmp_path, monitor, kind=Trainer, model=model)
    record = read_json_lines(tmp_path / "anomalies.jsonl")[0]

    assert (record["step"], record["kind"]) == (3, "gradient_not_finite")
    assert "layer" not in record


def test_the_culprit_in_mftrainer(tmp_path):
    """An exact replay names the module and micro-batch of a nan."""
    model = tiny_llama()
    poison = 31

    def spoil(module, inputs, output):
        tokens = model.tokens_of_this_call
        return output * torch.where((tokens == poison).any(), math.nan, 1.0)

    def note(module, positional, keywords):
        module.tokens_of_this_call = keywords["input_ids"]

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.model.layers[1].mlp.register_forward_hook(spoil)
    data = Counting(64, length=6)
    poisoned = [i for i in range(64) if (data[i]["input_ids"] == poison).any()]
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=model,
        data=data,
        callbacks=[TrainingStateMonitor(replay=True)],
        extras={"step": StepConfig(local_norm=True)},
        train_sampling_strategy="sequential",
        max_steps=5,
    )
    trainer.train()
    records = read_json_lines(tmp_path / "anomalies.jsonl")
    # Each update has four micro-batches of two rows, so rows 8n to 8n + 7 belong to update n + 1.
    # For each poisoned update, find its first poisoned micro-batch.
    first = {i // 8 + 1: (i % 8) // 2 for i in reversed(poisoned)}

    assert [record["step"] for record in records] == sorted(step for step in first if step <= 5)
    for record in records:
        if "is_replay_exact" in record:
            assert record["is_replay_exact"]
            assert record["name"] == "model.layers.1.mlp"
            assert record["layer"] == "model.layers.1"
            assert record["micro_batch"] == first[record["step"]]
    assert "is_replay_exact" in records[0]


def reads_per_run(folder, callbacks) -> list[str]:
    """Return the names of the host reads in updates 3 to 5 of a run without logging."""

    class Counts(TrainerCallback):
        names: tuple[str, ...] = ()

        def on_step_end(self, _args, state, *_, **__):
            if state.global_step == 2:
                self.modes = HostReads()
                self.modes.__enter__()
            if state.global_step == 5:
                self.modes.__exit__(None, None, None)
                self.names = tuple(self.modes.names)

    counts = Counts()
    new_trainer(
        MFTrainer,
        folder,
        data=Counting(64, length=8),
        callbacks=[counts, *callbacks],
        extras={"step": StepConfig(local_norm=True)},
        logging_strategy="no",
        max_steps=6,
    ).train()
    return list(counts.names)


def test_nothing_more_is_read_on_the_host(tmp_path):
    """All monitors and metrics together add no host read to a step."""
    monitor = TrainingStateMonitor(
        **EVERYTHING,
        update_ratio_format="jsonl",
        max_attention_logit_format="jsonl",
        expert_load_format="jsonl",
        expert_capacity_factor=1.0,
        stable_rank_config={"format": "jsonl", "step_interval": 1},
        throughput_baseline=1.0,
        replay=True,
        target=["layers.0", "head"],
    )
    others = [
        MFLossMonitor(tensorboard_dir=tmp_path),
        CheckpointMonitor(100, save_checkpoint_seconds=1000, embedding_local_norm_threshold=1e9),
        ReplicaCheck(1, gradients=True),
        EvalCallback(lambda: None, step_interval=100),
        EMACallback(0.9),
    ]

    assert reads_per_run(tmp_path, [monitor, *others]) == reads_per_run(tmp_path / "without", [])
    assert len(lines(tmp_path)) == 6
    shown = {tag.split("/")[0] for tag in lines(tmp_path)[3]}
    assert {"weight_stable_rank", "max_attention_logit", "adam_m_norm", "update_ratio"} <= shown


def test_a_loop_names_its_model_once(tmp_path):
    """A loop that gives model and optimizer to ``on_train_begin`` alone has all metrics."""
    network = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    monitor = TrainingStateMonitor(
        weight_state_format="jsonl", optimizer_state_format="jsonl", folder=tmp_path
    )
    state, control = TrainerState(max_steps=2), TrainerControl()
    monitor.on_train_begin(None, state, control, model=network, optimizer=optimizer)
    for _ in range(2):
        loss = network(torch.ones(1, 2)).square().sum()
        loss.backward()
        optimizer.step()
        state.global_step += 1
        monitor.on_step_end(None, state, control, step_output=loss.detach())
    monitor.on_train_end(None, state, control)

    records = read_json_lines(tmp_path / "training_state.jsonl")
    names = {"weight_norm", "adam_m_norm/weight", "adam_v_norm/bias"}
    assert [names <= record.keys() for record in records] == [True, True]


@pytest.mark.parametrize("target", [[".*"], ["weight"]])
def test_update_ratios(tmp_path, target):
    """Each reported step has the ratio of update and weight, of the weights of `target`."""
    network = torch.nn.Linear(16, 8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    monitor = TrainingStateMonitor(
        update_ratio_format="jsonl", target=target, step_interval=2, folder=tmp_path
    )
    state, control = TrainerState(max_steps=4), TrainerControl()
    known = {"model": network, "optimizer": optimizer}
    monitor.on_train_begin(None, state, control, **known)
    expected = []
    for _ in range(4):
        before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        loss = network(torch.ones(1, 16)).square().sum()
        loss.backward()
        optimizer.step()
        state.global_step += 1
        expected.append(
            {
                f"update_ratio/{name}": (
                    (weight - before[name]).norm() / before[name].norm()
                ).item()
                for name, weight in network.named_parameters()
                if name in target or target == [".*"]
            }
        )
        monitor.on_step_end(None, state, control, step_output=loss.detach(), **known)
        optimizer.zero_grad()
    monitor.on_train_end(None, state, control)

    found = [
        {name: value for name, value in record.items() if name.startswith("update_ratio/")}
        for record in lines(tmp_path)
    ]
    assert found == [pytest.approx(expected[1], rel=1e-5), pytest.approx(expected[3], rel=1e-5)]
