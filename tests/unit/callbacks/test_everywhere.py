"""In every loop, each monitor shows the available values and warns about missing values."""

import json
import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from mfwrap import MFTrainOneStepCell, Model, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import (
    CheckpointMonitor,
    EMACallback,
    EvalCallback,
    MemoryMonitor,
    MFLossMonitor,
    ProfileMonitor,
    RankClock,
    ReplicaCheck,
    TrainingStateMonitor,
)
from mfwrap.records.json_lines import read_json_lines
from mfwrap.records.run_record import read_run
from mfwrap.report.page import write_run_page
from mfwrap.trainer import MFTrainer
from support.trainer_runs import Counting, new_trainer, padded, tiny_llama

NUM_STEPS = 4
FORMATS = ["jsonl", "tensorboard", "log", "trackers"]
EVERYTHING = {
    **{
        f"{name}_format": FORMATS
        for name in (
            *("local_norm", "device_local_norm", "local_loss", "device_local_loss"),
            *("optimizer_state", "weight_state", "max_attention_logit", "expert_load"),
        )
    },
    "stable_rank_config": {"format": FORMATS, "step_interval": 2, "target": ["q_proj"]},
    "throughput_baseline": 1.0,
    "target": [r"layers\.0\."],
}
FORWARD = {"max_attention_logit", "weight_stable_rank", "weight_eigenvalue"}
STATES = {"adam_m_norm", "adam_v_norm", "weight_norm"}
OUTPUT = {"local_norm", "device_local_norm", "local_loss", "device_accum_local_loss"}
NUMBERS = {
    *("loss", "learning_rate", "loss_scale", "global_norm"),
    *("overflow", "skipped", "consecutive_skips"),
}
ALWAYS = {"step", "epoch", "throughput_linearity"}
SHOWN = {
    "MFTrainer": ALWAYS | NUMBERS | OUTPUT | STATES | FORWARD | {"max_grad_norm"},
    "Trainer": ALWAYS | STATES | FORWARD | {"max_grad_norm"},
    "Model": NUMBERS | OUTPUT | STATES | FORWARD | {"step", "epoch", "max_grad_norm"},
    "attached loop": ALWAYS | NUMBERS | OUTPUT | STATES | FORWARD,
}
SAID = {
    "MFTrainer": ["the load of experts"],
    "Trainer": ["the load of experts", "no `step_output`", "metrics in trackers"],
    "Model": ["throughput_linearity: the batch size is unknown", "the load of experts"],
    "attached loop": ["the load of experts"],
}
SHOWS_NOT = "TrainingStateMonitor cannot show"
TRACKED = {"MFTrainer", "attached loop", "Model"}
SAVES = {"MFTrainer", "Trainer"}


class Kept(GeneralTracker):
    """A tracker that keeps the logged values."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict]] = []

    @property
    def tracker(self):
        """Return the logged values."""
        return self.logged

    def store_init_configuration(self, values):
        """Ignore the configuration."""

    def log(self, values, step=None, **_):
        """Keep the values."""
        self.logged.append((step, values))


def monitors(folder, **settings):
    """Return one monitor of each kind, with all its outputs turned on."""
    return [
        MFLossMonitor(tensorboard_dir=folder / "loss"),
        TrainingStateMonitor(
            **EVERYTHING, folder=folder, tensorboard_dir=folder / "state", replay=True, **settings
        ),
        EvalCallback(lambda: {"answer": 42}, step_interval=2),
        ProfileMonitor(1, 2, folder / "profile"),
        ReplicaCheck(1, gradients=True, folder=folder),
        RankClock(2, folder=folder),
        MemoryMonitor(2, folder=folder),
    ]


def by_a_trainer(kind, folder):
    """Train with a Trainer; return its log entries that have a loss, which trackers also get."""
    extras = {"step": StepConfig(local_norm=True)} if kind is MFTrainer else None
    saving = CheckpointMonitor(2, keep_checkpoint_max=1)
    trainer = new_trainer(
        kind,
        folder,
        callbacks=[*monitors(folder), saving, EMACallback(0.9)],
        extras=extras,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=NUM_STEPS,
    )
    trainer.train()
    return [(one["step"], one) for one in trainer.state.log_history if "loss" in one]


def by_model(folder):
    """Train with `Model` and a cell; return the values that trackers get."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    tracker = Kept()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    network = tiny_llama()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    data = [padded([Counting(64)[8 * i + j] for j in range(8)]) for i in range(NUM_STEPS)]
    Model(cell).train(1, data, monitors(folder, log_to=accelerator.log))
    return tracker.logged


def by_attached_loop(folder):
    """Train in a custom loop; return the values that accelerate's trackers get."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    tracker = Kept()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=tracker)
    accelerator.init_trackers("run")
    attached = attach(accelerator, StepConfig(local_norm=True, use_clip_grad=True))
    network = tiny_llama()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = DataLoader(Counting(64), batch_size=2, collate_fn=padded)
    model, optimizer, schedule, loader = accelerator.prepare(network, optimizer, schedule, loader)
    state, control = TrainerState(max_steps=NUM_STEPS, train_batch_size=4), TrainerControl()
    callbacks = monitors(folder, log_to=accelerator.log)
    handler = CallbackHandler(callbacks, model, None, optimizer, schedule)
    handler.call_event("on_train_begin", None, state, control)
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            handler.call_event("on_step_begin", None, state, control)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                handler.call_event("on_pre_optimizer_step", None, state, control)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            state.global_step += 1
            outputs = {"step_output": attached.last_output, "step_report": attached.last_report}
            handler.call_event("on_step_end", None, state, control, **outputs)
        if state.global_step == NUM_STEPS:
            break
    handler.call_event("on_train_end", None, state, control)
    return tracker.logged


LOOPS = {
    "MFTrainer": lambda folder: by_a_trainer(MFTrainer, folder),
    "Trainer": lambda folder: by_a_trainer(Trainer, folder),
    "Model": by_model,
    "attached loop": by_attached_loop,
}


@pytest.fixture(scope="module", params=LOOPS)
def run(request, tmp_path_factory):
    """Return the name of a loop, its run folder, the tracked values and the log lines."""
    folder = tmp_path_factory.mktemp("run")
    said = []
    logger, handler = logging.getLogger("mfwrap.callbacks"), logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    try:
        tracked = LOOPS[request.param](folder)
    finally:
        logger.removeHandler(handler)
    return request.param, folder, tracked, said


def kinds(names) -> set[str]:
    """Return the parts of names before the first slash."""
    return {name.split("/")[0] for name in names}


def test_json_lines(run):
    """Each step has a record with all values that the loop makes available."""
    loop, folder, _, _ = run
    records = read_json_lines(folder / "training_state.jsonl")
    steps = [record for record in records if not any("eval_" in n for n in record)]

    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert kinds(name for record in steps for name in record) == SHOWN[loop]
    assert [any("stable_rank" in name for name in one) for one in steps] == [False, True] * 2
    evaluated = [record["step"] for record in records if "ema_eval_loss" in record]
    assert evaluated == ([2, 4] if loop in SAVES else [])


def test_curves_and_log(run):
    """TensorBoard and the log have the same values as the JSON lines."""
    loop, folder, _, said = run
    events = EventAccumulator(str(folder / "state"))
    events.Reload()
    records = read_json_lines(folder / "training_state.jsonl")
    expected = {}
    for record in records:
        for name, value in record.items():
            expected.setdefault(name, []).append((record["step"], value))
    tags = set(events.Tags()["scalars"])
    lines = [text for level, text in said if level == "INFO" and text.startswith("Epoch:[")]

    assert kinds(tags) == SHOWN[loop] - NUMBERS - {"step", "epoch", "max_grad_norm"}
    for tag in tags:
        scalars = [(event.step, event.value) for event in events.Scalars(tag)]
        assert scalars == [(step, pytest.approx(v, rel=1e-5)) for step, v in expected[tag]]
        assert sum(f"] {tag}: " in line for line in lines) == len(scalars)
    losses = EventAccumulator(str(folder / "loss"))
    losses.Reload()
    assert len(losses.Scalars("loss")) == NUM_STEPS


def test_trackers(run):
    """If the loop has trackers, they get the same values as the JSON lines, step by step."""
    loop, folder, tracked, _ = run
    if loop not in TRACKED:
        assert not {"weight_norm"} & {name for _, values in tracked for name in values}
        return
    records = read_json_lines(folder / "training_state.jsonl")
    by_step = {r["step"]: r for r in records if "weight_norm" in r}

    assert [step for step, _ in tracked] == [1, 2, 3, 4]
    for step, values in tracked:
        for name in kinds(by_step[step]) & OUTPUT | STATES:
            for tag, value in by_step[step].items():
                if tag.split("/")[0] == name:
                    assert values[tag] == pytest.approx(value, rel=1e-6), tag
        assert values["loss"] == pytest.approx(by_step[step]["loss"], rel=1e-3)


def test_what_cannot_be_shown_is_said_once(run):
    """Values that cannot be shown are named in one warning per reason."""
    loop, _, _, said = run
    warnings = [text for level, text in said if level == "WARNING" and text.startswith(SHOWS_NOT)]

    assert len(warnings) == len(SAID[loop])
    for text, word in zip(warnings, SAID[loop], strict=True):
        assert word in text


def test_other_monitors(run):
    """Evaluations are logged, steps are profiled, and a Trainer saves healthy checkpoints."""
    loop, folder, _, said = run
    evaluations = [text for _, text in said if text.startswith("Eval result: {'answer': 42}")]
    trace = json.loads((folder / "profile" / "rank_0" / "trace.json").read_text())

    assert len(evaluations) == 2
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    if loop in SAVES:
        health = read_json_lines(folder / "checkpoint_health.jsonl")
        assert [(one["step"], one["healthy"]) for one in health] == [(2, True), (4, True)]
    assert not (folder / "anomalies.jsonl").exists()
    times = folder / "rank_clock.jsonl"
    if loop == "Trainer":
        assert not times.exists()
    else:
        # A save sends all times; without one, those of the last message's own step are not sent.
        last = 4 if loop in SAVES else 3
        recorded = [(one["step"], one["update"][0] > 0) for one in read_json_lines(times)]
        assert recorded == [(step, True) for step in range(1, last + 1)]


def test_the_page_reads_what_was_written(run):
    """The run page shows the recorded curves, with groups in the network's order."""
    loop, folder, _, _ = run
    read = read_run(folder)
    write_run_page([folder], folder / "page.html")
    text = (folder / "page.html").read_text(encoding="utf-8")

    assert read.curves["weight_norm"].steps == [1, 2, 3, 4]
    assert "loss" in read.curves
    assert read.max_grad_norm == (None if loop == "attached loop" else 1.0)
    shown = [name for name, _ in tiny_llama().named_parameters() if "layers.0." in name]
    if loop in {"Model", "attached loop"}:
        assert list(read.local_norms[0]) == shown
    if loop == "MFTrainer":
        # The monitor's norms come first. The Trainer's log adds the norms of all other parameters.
        assert list(read.local_norms[0])[: len(shown)] == shown
    if loop in SAVES:
        assert read.curves["ema_eval_loss"].steps == [2, 4]
    assert 'id="loss"' in text
