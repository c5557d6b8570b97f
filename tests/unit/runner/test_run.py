"""Shipped recipes run at a small size, and each section has its effect on a run."""

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mfwrap.checkpoints.verification import verify
from mfwrap.records import read_json_lines
from mfwrap.records.row_losses import read_row_losses
from mfwrap.runner import RecipeError, parse_recipe
from mfwrap.runner.library import shipped_recipes
from mfwrap.runner.run import build_trainer, run_recipe
from support.recipe_data import recipe_of
from support.recipe_texts import BERT, PERCEPTRON, SMALL_LLAMA, VIT, recipe_text
from support.shipped_recipes import provide
from support.versions import COUNTS_SHIFTED

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

TINY = [
    "training.max_steps=4",
    "training.num_train_epochs=1",
    "training.per_device_train_batch_size=2",
    "training.gradient_accumulation_steps=1",
    "training.eval_strategy=steps",
    "training.save_strategy=steps",
    "training.eval_steps=2",
    "training.save_steps=2",
    "training.logging_steps=2",
    "training.warmup_steps=1",
    "training.use_cpu=true",
    "data.max_train_samples=12",
    "data.max_eval_samples=4",
]
TUNED = ["model.config.num_hidden_layers=1", "callbacks.1.max_new_tokens=4"]
SMALL = {
    "causal_lm": ["model.config.num_hidden_layers=1", "data.max_eval_samples=1"],
    "continue_pretraining": ["data.sequence_length=64"],
    "distillation": ["model.config.num_hidden_layers=1", "training.max_completion_length=8"],
    "embedding": ["data.sequence_length=8", "training.per_device_eval_batch_size=4"],
    # Answers of equal rewards teach nothing. These have many tokens, some of which are repeated.
    "grpo": [
        "model.config.num_hidden_layers=1",
        "training.per_device_train_batch_size=8",
        "reward={type: get_repetition_penalty_reward, ngram_size: 1}",
    ],
    "image_classification": ["model.config.num_hidden_layers=1"],
    "lora": [*TUNED, "training.max_length=64"],
    "minilm_classification": ["data.sequence_length=8", "training.per_device_eval_batch_size=4"],
    "qlora": ["model.config.num_hidden_layers=1", "training.max_length=64"],
    "preference_tuning": ["model.config.num_hidden_layers=1", "training.max_length=64"],
    "regression": [],
    "sequence_classification": ["model.config.num_hidden_layers=1", "data.sequence_length=32"],
    "supervised_tuning": [*TUNED, "training.max_length=64"],
    "token_classification": ["model.config.num_hidden_layers=1", "data.sequence_length=32"],
}


def records(folder) -> list[dict]:
    """Return the records of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder, *overrides, text=None, resume=False, **sections):
    """Run a recipe into a folder."""
    name = "r.yaml"
    text = recipe_text(**sections) if text is None else text
    recipe = parse_recipe(text, name, [*overrides, f"training.output_dir={folder}"])
    return run_recipe(recipe, resume=resume)


def test_checkpoints_in_the_background(tmp_path, caplog):
    """With `async_save`, a run writes its checkpoints in the background, and resumes from them."""
    settings = ["async_save=true", "training.save_steps=2", "training.save_strategy=steps"]
    with caplog.at_level("INFO", "mfwrap.checkpoints.host_copies"):
        run(tmp_path / "a", *settings)
    assert "checkpoints in the background take" in caplog.text
    for checkpoint in (tmp_path / "a").glob("checkpoint-*"):
        verify(checkpoint)


@COUNTS_SHIFTED
@pytest.mark.parametrize(
    "name", ["causal_lm", pytest.param("supervised_tuning", marks=pytest.mark.slow)]
)
def test_a_loss_per_token(tmp_path, name):
    """With `eval_per_token_loss`, `eval_loss` is the mean over the targets of all held-out rows."""
    settings = [*TINY, *SMALL[name], "data.max_eval_samples=7", "eval_per_token_loss=true"]
    recipe = parse_recipe(
        shipped_recipes()[name].text,
        name,
        [*settings, "training.per_device_eval_batch_size=2", f"training.output_dir={tmp_path}"],
    )
    trainer, _ = build_trainer(recipe)
    losses = targets = 0.0
    for batch in trainer.get_eval_dataloader():
        with torch.no_grad():
            logits = trainer.model.eval()(**batch).logits[:, :-1].double()
        labels = batch["labels"][:, 1:]
        losses += torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="sum"
        ).item()
        targets += labels.ne(-100).sum().item()

    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses / targets, rel=1e-5)


WORDS = ["one", "two", "three", "four", "five", "six"]
LANGUAGE = {"config": SMALL_LLAMA, "tokenizer": "bytes"}


def labelled(number):
    """Return a row for any task; classes, lengths and sites are uneven."""
    words = WORDS[: 1 + number % 6]
    return {
        "text": " ".join(words),
        "label": "ab"[number % 5 == 0],
        "tokens": words,
        "labels": [number % 2] * len(words),
        "features": [number, number % 3],
        "target": number % 7,
        "image": [[number / 40, 0.0, 0.5, 1.0]] * 4,
        "prompt": f"{number}?",
        "completion": " ".join(words),
        "site": ["web", "web", "books"][number % 3],
    }


OF_TASKS = {
    "causal_lm": (
        ("text",),
        {"sequence_length": 16},
        {"config": SMALL_LLAMA, "tokenizer": "bytes"},
    ),
    "sequence_classification": (("text", "label"), {"sequence_length": 32}, BERT),
    "token_classification": (("tokens", "labels"), {"sequence_length": 32}, BERT),
    "image_classification": (("image", "label"), {}, VIT),
    "regression": (("features", "target"), {}, PERCEPTRON),
    "supervised_tuning": (("prompt", "completion"), {}, LANGUAGE),
}
"""Columns, further keys of the data, and model, by task."""


@pytest.mark.parametrize("task", OF_TASKS)
def test_loss_by_source(tmp_path, task, monkeypatch):
    """Each task has the loss by source of its rows, in the log, in the records and by row."""
    monkeypatch.chdir(tmp_path)
    columns, keys, model = OF_TASKS[task]
    rows = [{n: v for n, v in labelled(k).items() if n in {*columns, "site"}} for k in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = {"path": "rows.json", "eval_fraction": 0.1, "loss_by": "site", "row_losses": True}
    training = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 4}
    text = recipe_text(task=task, model=None, data=None, training=training)
    text += f"model: {json.dumps(model)}\ndata: {json.dumps(data | keys)}\n"
    run(tmp_path / "run", text=text)

    log = [record for record in records(tmp_path / "run") if "tokens/web" in record]
    assert [record["step"] for record in log] == [2, 4]
    table = read_row_losses(tmp_path / "run").to_pandas()
    assert set(table.source) == {"web", "books"}
    for record in log:
        of_log = table[(table.step > record["step"] - 2) & (table.step <= record["step"])]
        for name, group in of_log.groupby("source"):
            assert record[f"tokens/{name}"] == group.targets.sum()
            mean = (group.loss * group.targets).sum() / group.targets.sum()
            assert record[f"loss/{name}"] == pytest.approx(mean, rel=1e-5)
    assert len(table) == 4 * 2 * 4


WORD = f"({'|'.join(WORDS)})"
SAMPLED = {
    "causal_lm": (".+", ".*"),
    "sequence_classification": (f"{WORD}( {WORD})*", r"[ab] [01]\.\d\d"),
    "token_classification": (f"{WORD}( {WORD})*", f"{WORD}/[01]( {WORD}/[01])*"),
    "image_classification": (r"pixel_values of shape \(1, 4, 4\)", r"[ab] [01]\.\d\d"),
    "regression": (r"features: \d+, [012]", r"-?[\d.e-]+"),
    "supervised_tuning": (r"\d+\?", ".*"),
}
"""Patterns of the inputs and the answers of samples, by task."""


@pytest.mark.parametrize("task", OF_TASKS)
def test_samples(tmp_path, task, monkeypatch):
    """Each task shows what the model says about held-out rows, with raw and averaged weights."""
    monkeypatch.chdir(tmp_path)
    columns, keys, model = OF_TASKS[task]
    rows = [{n: v for n, v in labelled(k).items() if n in columns} for k in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monitor = {"type": "SampleMonitor", "num_rows": 2, "max_new_tokens": 4}
    text = recipe_text(
        task=task,
        model=None,
        data=None,
        training={"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
        callbacks=[monitor],
        ema={"decay": 0.5},
    )
    data = {"path": "rows.json", "eval_fraction": 0.1}
    text += f"model: {json.dumps(model)}\ndata: {json.dumps(data | keys)}\n"
    run(tmp_path / "run", text=text)

    found = read_json_lines(tmp_path / "run" / "samples.jsonl")
    assert [(one["step"], one["averaged"], one["prompt"]) for one in found] == [
        (step, averaged, number)
        for step, averaged in ((0, False), (1, False), (1, True), (2, False), (2, True))
        for number in (0, 1)
    ]
    of_input, of_answer = SAMPLED[task]
    assert all(re.fullmatch(of_answer, one["text"], re.DOTALL) for one in found)
    assert all(re.fullmatch(of_input, one["input"], re.DOTALL) for one in found[:2])
    assert all(one["reference"] for one in found[:2])
    assert all(("image" in one) == (task == "image_classification") for one in found[:2])


QUICK = {"causal_lm", "regression"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in shipped_recipes()],
)
def test_shipped_recipes_run(name, tmp_path, monkeypatch):
    """A shipped recipe trains, records every step and evaluation, and saves model and recipe."""
    monkeypatch.chdir(tmp_path)
    provide(name, tmp_path)
    result = run(tmp_path, *TINY, *SMALL[name], text=shipped_recipes()[name].text)
    found = records(tmp_path)
    steps = [record for record in found if "loss" in record]

    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(record["loss"]) and record["global_norm"] > 0 for record in steps)
    assert [
        record["step"] for record in found if "eval_loss" in record or "ema_eval_loss" in record
    ]
    assert math.isfinite(result.metrics["eval_loss"])
    assert (tmp_path / "checkpoint-4").is_dir()
    assert any((tmp_path / "model").glob("*.safetensors"))
    again = parse_recipe((tmp_path / "recipe.yaml").read_text(), "again")
    assert again.arguments.max_steps == 4


def test_the_data_of_the_default_recipe_are_those_of_the_script():
    """The default recipe trains on as many bytes as the script, apart from end tokens."""
    from mfwrap.recipes.causal_lm import IGNORED_LABEL, PythonTopics, topics  # noqa: PLC0415  (only this test needs it)

    text = shipped_recipes()["causal_lm"].text
    trainer, _ = build_trainer(parse_recipe(text, "causal_lm", ["training.use_cpu=true"]))
    names = [name for i, name in enumerate(sorted(topics)) if i % 10]
    pieces = PythonTopics(names, 256)
    bytes_of_script = sum(int((one["labels"] != IGNORED_LABEL).sum()) for one in pieces)
    tokens = sum(len(one["input_ids"]) for one in trainer.train_dataset)

    # The recipe adds an end token to each text. A piece with only an end token is left out.
    assert bytes_of_script <= tokens <= bytes_of_script + len(names)


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_is_fine_tuned(tmp_path, adapter):
    """A local checkpoint is fine-tuned on JSON Lines with prompts: all weights, or an adapter."""
    start = tmp_path / "start"
    sections = {
        "task": "supervised_tuning",
        "model": {"config": SMALL_LLAMA, "tokenizer": "bytes"},
        "training": {"max_length": 48, "bf16": False, "gradient_checkpointing": False},
    }
    rows = [{"prompt": f"{n} plus {n} is", "completion": f" {2 * n}"} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"type": "json_lines", "path": str(tmp_path / "train.jsonl"), "eval_fraction": 0.2}
    text = recipe_text(data=None, **sections | {"model": None})
    trainer, _ = build_trainer(
        parse_recipe(
            text + f"model: {json.dumps(sections['model'])}\ndata: {json.dumps(data)}\n",
            "start",
            [f"training.output_dir={start}"],
        )
    )
    trainer.save_model(str(start))
    peft = "peft: {type: lora, r: 2, target_modules: [q_proj]}\n" if adapter else ""
    result = run(
        tmp_path / "run",
        text=text + f"model: {{path: {start}}}\ndata: {json.dumps(data)}\n" + peft,
    )
    before = AutoModelForCausalLM.from_pretrained(start)

    assert math.isfinite(result.metrics["eval_loss"])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) == 261
    if adapter:
        assert (tmp_path / "run" / "model" / "adapter_config.json").exists()
    else:
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
        assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_the_average_is_evaluated_and_saved(tmp_path):
    """With a section ``ema`` the averaged weights are evaluated and saved, too."""
    result = run(tmp_path, ema={"decay": 0.5})

    assert result.metrics["ema_eval_loss"] != result.metrics["eval_loss"]
    assert (tmp_path / "model_ema" / "model.safetensors").exists()


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path):
    """A resumed run has the weights of an uninterrupted run, bitwise, and one record per step."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    run(tmp_path / "whole", training=saving, ema={"decay": 0.9})
    run(tmp_path / "halves", training=saving, ema={"decay": 0.9})
    run(tmp_path / "halves", training=saving, ema={"decay": 0.9},
        resume=str(tmp_path / "halves" / "checkpoint-3"))  # fmt: skip
    whole, halves = records(tmp_path / "whole"), records(tmp_path / "halves")

    assert [r["step"] for r in halves if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert halves == whole
    for name in ("model", "model_ema"):
        files = [tmp_path / run / name / "model.safetensors" for run in ("whole", "halves")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_mindformers_schedule_sets_the_rates(tmp_path):
    """The recorded rates follow MindFormers' formula: a warm-up from 0, then a linear fall."""
    section = {"type": "LinearWithWarmUpLR", "learning_rate": 0.6, "warmup_steps": 2}
    run(tmp_path, lr_schedule=section | {"total_steps": -1}, training={"learning_rate": 0.6})
    rates = [r["learning_rate"] for r in records(tmp_path) if "loss" in r]

    assert rates == pytest.approx([0, 0.3, 0.6, 0.45, 0.3, 0.15], abs=1e-7)


def test_loss_scale_and_norms_are_recorded(tmp_path):
    """The records have the growing loss scale, and local norms that match the global norm."""
    scale = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 8, "scale_factor": 2}
    wrapper = {"scale_sense": scale | {"scale_window": 2}, "use_clip_grad": True}
    run(tmp_path, runner_wrapper=wrapper | {"max_grad_norm": 0.1, "local_norm": True})
    steps = [r for r in records(tmp_path) if "loss" in r]

    assert [r["loss_scale"] for r in steps] == [8, 16, 16, 32, 32, 64]
    assert math.hypot(*steps[0]["local_norm"].values()) == pytest.approx(steps[0]["global_norm"])


@pytest.mark.parametrize(
    ("shown", "adds"),
    [("log", set()), ("jsonl", {"training_state.jsonl"}), ("tensorboard", {"tensorboard"})],
)
def test_formats_of_the_monitor_are_what_a_run_writes(tmp_path, shown, adds):
    """The monitor writes records and curves only if their format is set."""
    run(tmp_path, monitor_config={"monitor_on": True, "device_local_norm_format": shown})
    found = {path.name for path in tmp_path.iterdir()}

    assert found & {"training_state.jsonl", "tensorboard", "anomalies.jsonl"} == adds


@pytest.mark.parametrize(
    ("rows", "standardizes"), [(None, True), ({(0, 1)}, True), ({(0, 1)}, False)]
)
def test_left_out_rows_still_count_in_the_scale(rows, standardizes):
    """A warning says so: a row with a huge target spoils the unit of the loss."""
    said = []
    model = PERCEPTRON | {"config": PERCEPTRON["config"] | {"standardize": standardizes}}
    build_trainer(parse_recipe(recipe_text(model=model), "r.yaml"), rows, said.append)

    warned = [line for line in said if line.startswith("warning: the rows that are left out still")]
    assert len(warned) == (rows is not None and standardizes)


def test_spikes_are_skipped(tmp_path):
    """A threshold below every norm skips all updates."""
    wrapper = {"use_clip_grad": True, "use_skip_data_by_global_norm": True}
    run(tmp_path, runner_wrapper=wrapper | {"global_norm_spike_threshold": 1e-6})

    assert all(r["skipped"] for r in records(tmp_path) if "loss" in r)


def test_per_token_loss_needs_support_by_the_model(tmp_path):
    """A model that does not accept the number of targets is an error."""
    with pytest.raises(RecipeError, match=r"runner_wrapper\.calculate_per_token_loss: expected"):
        run(tmp_path, runner_wrapper={"calculate_per_token_loss": True})


@pytest.mark.parametrize("per_token", [None, True, False])
def test_per_token_loss(tmp_path, per_token):
    """``calculate_per_token_loss`` is on by default, and off only if it is ``False``."""
    (tmp_path / "t.txt").write_text("ab\nabcdefghij klmnop\n" * 4)
    text = recipe_text(
        task="causal_lm",
        model={"config": SMALL_LLAMA},
        data=None,
        training={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        runner_wrapper={"calculate_per_token_loss": per_token},
    )
    data = {"type": "text", "path": str(tmp_path / "t.txt"), "eval_fraction": 0.25}
    recipe = parse_recipe(text + f"data: {json.dumps(data)}\n", "r.yaml")

    trainer, _ = build_trainer(recipe)
    assert trainer.model_accepts_loss_kwargs is (per_token is not False)


def test_a_callback_of_mindspores_kind(tmp_path):
    """A callback with MindSpore's interface works in a recipe."""
    run(tmp_path, callbacks=[{"type": "TimeMonitor"}])

    assert len([r for r in records(tmp_path) if "loss" in r]) == 6


def test_a_clock_of_ranks(tmp_path):
    """`RankClock` writes into the run folder; a checkpoint has the times of all steps before it."""
    saves = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    run(tmp_path, callbacks=[{"type": "RankClock", "step_interval": 2}], training=saves)

    times = read_json_lines(tmp_path / "rank_clock.jsonl")
    assert [one["step"] for one in times] == [1, 2, 3, 4, 5, 6]
    lengths = json.loads((tmp_path / "checkpoint-3" / "mfwrap_records_0.json").read_text())
    whole = (tmp_path / "rank_clock.jsonl").read_bytes().splitlines(keepends=True)
    assert lengths["files"]["rank_clock.jsonl"]["num_bytes"] == sum(map(len, whole[:3]))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"a": 1}] * 4, "data.type: expected data with the columns"),
        ([{"features": [1.0], "target": 1.0, "x": 2}], "data.eval_fraction or data.eval_path, or"),
    ],
)
def test_data_that_do_not_fit(tmp_path, lines, says):
    """An error that is found only when the data are read is a `RecipeError`, too."""
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = recipe_text(data=None, training={"eval_strategy": "epoch"})
    data = {"type": "json_lines", "path": str(tmp_path / "d.jsonl")}
    with pytest.raises(RecipeError, match=says):
        run(tmp_path / "run", text=text + f"data: {json.dumps(data)}\n")


def test_a_batch_that_grows(tmp_path):
    """The run's log has the sizes, and a run that resumes ends with the same weights."""
    settings = [
        "rampup_batch_size=[4, 4, 40]",
        "training.per_device_train_batch_size=4",
        "training.gradient_accumulation_steps=4",
        "training.max_steps=9",
        "training.save_strategy=steps",
        "training.save_steps=3",
        "training.logging_steps=1",
    ]
    run(tmp_path / "whole", *settings)
    run(tmp_path / "resumed", *settings, resume=str(tmp_path / "whole" / "checkpoint-6"))

    state = json.loads((tmp_path / "resumed" / "checkpoint-9" / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "global_batch_size" in entry]
    # Three levels of 40 / 3 rows, and the global batch after 40. An epoch has 64 rows.
    sizes = [4, 4, 4, 4, 8, 8, 12, 16, 4]
    assert [entry["global_batch_size"] for entry in logged] == sizes
    assert logged[-1]["num_samples_seen"] == 64
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "resumed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_an_anomaly_names_the_line_of_a_file(tmp_path):
    """The row that has an absurd target is named with the line of its file."""
    rows = [f"{n % 7},{n % 5},{n % 3}" for n in range(200)]
    rows[130] = "1,2,1e20"
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["a,b,target", *rows]))
    settings = {"output_dir": str(tmp_path / "run"), "max_steps": 45}
    recipe = recipe_of(
        "regression",
        {"path": str(file), "columns": {"features": ["a", "b"]}},
        "monitor_config={monitor_on: true, replay: true}",
        model=PERCEPTRON,
        per_device_train_batch_size=4,
        **settings,
    )
    run_recipe(recipe)
    [first, *_] = read_json_lines(tmp_path / "run" / "anomalies.jsonl")

    assert [sample["source"] for sample in first["samples"]] == [f"{file}:132"]


@pytest.mark.parametrize(
    ("num_huge", "said", "in_card"),
    [
        (0, None, "16 updates for the task `regression`, with MindFormers' training step in"),
        (4, None, "12 of 16 updates were applied for the task"),
        (12, "12 of 16 updates were skipped, because a gradient was not finite", "4 of 16 updates"),
        (
            16,
            (
                "none of the 16 updates was applied, because no gradient was finite; the weights "
                "are those of the start"
            ),
            "in mfwrap; the others were skipped because a gradient was not finite.",
        ),
    ],
)
def test_updates_that_are_skipped(tmp_path, num_huge, said, in_card):
    """The card has the number of applied updates; at its end, a run warns of many skipped ones."""
    masses = [1e30] * num_huge + [1.0] * (16 - num_huge)
    rows = [{"features": [mass], "target": float(n)} for n, mass in enumerate(masses)]
    lines = []
    training = {"output_dir": str(tmp_path), "max_steps": 16, "per_device_train_batch_size": 1}
    text = recipe_text(training=training)
    model = Squared()
    start = model.scale.detach().clone()
    run_recipe(parse_recipe(text, "r.yaml"), model=model, data=(rows, rows[-1:]), say=lines.append)

    assert [f"warning: {said}"] * (said is not None) == [line for line in lines if "update" in line]
    assert in_card in (tmp_path / "model" / "README.md").read_text()
    assert torch.equal(model.scale, start) == (num_huge == 16)


class Squared(torch.nn.Module):
    """Square features, which overflows in float32 for large ones."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, features, labels=None):
        """Return the mean squared error."""
        output = (self.scale * features**2).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(output, labels), "logits": output}


class Endless(torch.nn.Module):
    """A model whose loss has no lower bound."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, features, labels=None):
        """Return a loss that falls faster and faster."""
        output = self.scale.exp() * features.squeeze(-1)
        return {"loss": -output.mean(), "logits": output}


@pytest.mark.parametrize(("rate", "diverges"), [(1e-3, False), (1.0, True)])
def test_a_training_that_has_diverged(tmp_path, caplog, rate, diverges):
    """A run says so at its end, too, with the step and what was found."""
    rows = [{"features": [1.0], "target": 1.0} for _ in range(8)]
    training = {"output_dir": str(tmp_path), "max_steps": 40, "learning_rate": rate}
    text = recipe_text(training=training, monitor_config={"monitor_on": True})
    run_recipe(parse_recipe(text, "r.yaml"), model=Endless(), data=(rows, rows[:1]))

    said = [line for line in caplog.messages if "the training diverged" in line]
    assert len(said) == diverges
    expected = r"the training diverged at step \d+ \(.*\); .*; see `mfwrap report .*`"
    assert all(re.fullmatch(expected, line) for line in said)


def test_settings_that_a_resume_changes(tmp_path):
    """A line names them with both values; the same recipe says nothing of them."""
    training = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    lines = []
    for steps, resume in ((2, False), (2, True), (4, True)):
        text = recipe_text(training=training | {"max_steps": steps})
        lines.append("--")
        run_recipe(parse_recipe(text, "r.yaml"), resume=resume, say=lines.append)

    said = [line for line in lines if line == "--" or "other settings" in line]
    change = "the run continues with other settings: training.max_steps 2, now 4"
    assert said == ["--", "--", "--", change]

    lines.clear()
    text = recipe_text(training=training | {"output_dir": str(tmp_path / "new"), "max_steps": 6})
    checkpoint = str(tmp_path / "checkpoint-2")
    run_recipe(parse_recipe(text, "r.yaml"), resume=checkpoint, say=lines.append)
    assert "the run continues with other settings: training.max_steps 4, now 6" in lines
