"""A mutated recipe or data file is refused in one line, or validated and trained without error."""

import contextlib
import copy
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfwrap.cli import main
from mfwrap.recipe.library import shipped_recipes
from support.recipe_texts import RECIPE, SMALL_LLAMA

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

LONGEST = 120
"""Seconds after which a command counts as hung. Each needs one to ten."""

SMALL = {
    "data": {"max_train_samples": 12, "max_eval_samples": 4},
    "training": {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "warmup_steps": 0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
    },
}
"""Settings with which a run of a shipped recipe is one small step."""

MINDFORMERS = {
    "runner_wrapper": {
        "type": "MFTrainOneStepCell",
        "scale_sense": {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": 1024,
            "scale_factor": 2,
            "scale_window": 3,
        },
        "use_clip_grad": True,
        "max_grad_norm": 1.0,
        "local_norm": True,
    },
    "lr_schedule": {"type": "CosineWithWarmUpLR", "lr_end": 1e-3, "warmup_steps": 0},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8},
    "ema": {"decay": 0.9, "warmup": True},
    "callbacks": [{"type": "MFLossMonitor", "per_print_times": 2}],
    "monitor_config": {"monitor_on": True, "step_interval": 1, "weight_state_format": "jsonl"},
}
ROWS = {
    "causal_lm": [{"text": f"a text of {n} words"} for n in range(6)],
    "sequence_classification": [{"text": f"text {n}", "label": n % 2} for n in range(6)],
    "token_classification": [{"tokens": ["a", str(n)], "labels": ["x", "y"]} for n in range(6)],
    "regression": [{"features": [n, 1.5], "target": n / 2} for n in range(6)],
    "supervised_tuning": [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(6)],
}
"""Rows of a small data file for each of these tasks."""


def recipes() -> dict[str, dict]:
    """Return small recipes by name: those of the package, of a data file and of MindFormers."""
    found = {}
    for name, shipped in shipped_recipes().items():
        recipe = yaml.safe_load(shipped.text)
        for section, values in SMALL.items():
            recipe[section] |= values
        if "config" in recipe["model"]:
            recipe["model"]["config"]["num_hidden_layers"] = 1
        if name != "minilm_classification":  # its model is too large to be tried here
            found[name] = recipe
    found["mindformers"] = copy.deepcopy(RECIPE) | copy.deepcopy(MINDFORMERS)
    found["mindformers"]["training"] = dict(SMALL["training"])
    del found["mindformers"]["training"]["warmup_steps"]
    for task, recipe in {task: copy.deepcopy(RECIPE) for task in ROWS}.items():
        recipe |= {"task": task, "data": {"type": "json_lines", "path": "rows.jsonl"}}
        recipe["training"] = {**SMALL["training"], "seed": 3}
        if task == "supervised_tuning":
            recipe["training"] |= {"bf16": False, "activation_checkpointing": False}
        if task != "regression":
            kind = {"model_type": "bert"} if "classification" in task else {}
            recipe["model"] = {"config": SMALL_LLAMA | kind, "tokenizer": "bytes"}
        found[f"data_{task}"] = recipe
    return found


NUMBERS = [0, -1, 1, 2, 7, 10**12, -(10**12), 0.5, 1.5, 1e38, 1e308, float("inf"), float("nan")]
TEXTS = ["", "x", "no", "bytes", "../..", "/etc", "1e-3", "a: b", "MFLossMonitor", "ä", "a\0b", "~"]
NESTED = [[], [1, "a"], {}, {"type": "x"}, {"type": ["x"]}, {"a": {"b": [None]}}, [[]], [{}]]
VALUES = st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *NESTED])
ADDED = ["extra", "learning_rates", "decay_", "typ", "type", "<<", "hub_token", "path"]
INSERTED = rb"\xff|\0|{|}|\"|\n|\ud800|: |&a |*a|<<: |- |\t|NaN|#".split(b"|")
BYTES = st.sampled_from([*INSERTED, b"\xff", b"\0", b"\n", b"\t", b"[" * 5_000, b"9" * 5_000])


def paths(value, at=()) -> Iterator[tuple]:
    """Yield the path of every value in mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, (dict, list)):
            yield from paths(inner, (*at, key))


def change_value(draw, data) -> None:
    """Replace, remove, rename or add one value, in place."""
    path = draw(st.sampled_from(sorted(paths(data), key=str)))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    kinds = ["replace", "remove", "rename", "add"]
    kind = draw(st.sampled_from(kinds if isinstance(holder, dict) else kinds[:2]))
    if kind == "replace":
        holder[path[-1]] = draw(VALUES)
    elif kind == "remove":
        del holder[path[-1]]
    elif kind == "rename":
        holder[f"{path[-1]}{draw(st.sampled_from('s_x'))}"] = holder.pop(path[-1])
    else:
        holder[draw(st.sampled_from(ADDED))] = draw(VALUES)


def change_bytes(draw, content: bytes) -> bytes:
    """Cut, insert, repeat or flip bytes."""
    start = draw(st.integers(0, max(0, len(content) - 1)))
    end = min(len(content), start + draw(st.integers(1, 40)))
    kind = draw(st.sampled_from(["cut", "truncate", "insert", "repeat", "flip"]))
    if kind == "cut":
        return content[:start] + content[end:]
    if kind == "truncate":
        return content[:start]
    if kind == "insert":
        return content[:start] + draw(BYTES) + content[start:]
    if kind == "repeat":
        return content[:end] + content[start:]
    flipped = bytes([content[start] ^ 1 << draw(st.integers(0, 7))])
    return content[:start] + flipped + content[start + 1 :]


@st.composite
def mutations(draw, name: str) -> tuple[bytes, bytes]:
    """Return the bytes of a recipe and of its data file, one of which is mutated."""
    recipe = recipes()[name]
    rows = copy.deepcopy(ROWS.get(recipe["task"], []))
    kinds = ["recipe", "text"]
    if name.startswith("data_"):
        kinds += ["rows", "rows", "bytes", "bytes"]
    kind = draw(st.sampled_from(kinds))
    if kind == "recipe":
        change_value(draw, recipe)
    if kind == "rows":
        change_value(draw, rows)
    # `json` writes what YAML cannot: inf and nan become words, as they do in files of users.
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode()
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    if kind == "text":
        text = change_bytes(draw, text)
    if kind == "bytes":
        lines = change_bytes(draw, lines)
    return text, lines


def call(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, output and errors."""
    output, errors = io.StringIO(), io.StringIO()

    def give_up(*_: object) -> None:
        pytest.fail(f"{arguments} hung for {LONGEST} seconds")

    former = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main(list(arguments))
    except SystemExit as left:
        return int(left.code or 0), output.getvalue(), errors.getvalue()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    raise AssertionError(arguments)


def check(folder: Path, mutation: tuple[bytes, bytes]) -> bool:
    """Validate a mutated recipe, and train one step if it is valid; return whether it was."""
    text, lines = mutation
    with contextlib.chdir(folder):
        Path("r.yaml").write_bytes(text)
        Path("rows.jsonl").write_bytes(lines)
        code, out, err = call("validate", "r.yaml")
        said = [line for line in err.splitlines() if not line.startswith("mfwrap: warning: ")]
        assert code in {0, 2}, (text, err)
        if code == 2:
            assert len(said) == 1, (text, err)
            assert said[0].startswith(("mfwrap: r.yaml: ", "mfwrap: r.yaml:")), said
            assert len(said[0]) < 1_100
            assert "Traceback" not in err
            return False
        if out != "r.yaml: valid\n":
            return False
        code, _, err = call(
            "train", "r.yaml", "--overwrite",
            "--set", "training.output_dir=run", "--set", "training.max_steps=1",
        )  # fmt: skip
        assert code == 0, (text.decode(errors="replace"), lines, err)
        return True


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_small_recipes_are_valid(name, tmp_path):
    """The recipes are valid, and train one step, before they are mutated."""
    recipe = recipes()[name]
    rows = "".join(f"{json.dumps(row)}\n" for row in ROWS.get(recipe["task"], []))

    assert check(tmp_path, (yaml.safe_dump(recipe).encode(), rows.encode()))


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(mutations("data_regression"))
def test_mutated_recipes(tmp_path_factory, mutation):
    """A few mutated recipes and data files are refused in one line, or train without error."""
    check(tmp_path_factory.mktemp("mutated"), mutation)


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_many_mutated_recipes(name, tmp_path_factory):
    """Twenty mutations of each large recipe, and sixty of each small one, are refused or train."""
    number = 60 if name == "mindformers" or name.startswith("data_") else 20

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(mutations(name))
    def test(mutation):
        check(tmp_path_factory.mktemp("mutated"), mutation)

    test()
