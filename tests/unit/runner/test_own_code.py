"""Classes of the user's own in a recipe: what is imported, when, and what is refused."""

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from mfwrap.cli import main
from mfwrap.runner import RecipeError, load_recipe, run_recipe
from mfwrap.runner.own_code import OwnCode
from mfwrap.runner.preview import preview
from support.own_parts import IMPORTED, write_project
from support.ports import free_port

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


def command(*words, cwd, launcher=()):
    """Run ``mfwrap`` in a new process, and return the completed process."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, launcher), "-m", "mfwrap", *map(str, words)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def checked(folder, *overrides, **sections):
    """Write the project, and return its checked recipe."""
    return load_recipe(write_project(folder, **sections), overrides, allow_code=True)


def refused(folder, *overrides, **sections):
    """Check an invalid recipe, and return the error message, which must be one line."""
    with pytest.raises(RecipeError) as error:
        checked(folder, *overrides, **sections)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Train a project of a user as a user does it, from another folder; return its folder."""
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    result = command("train", "my.yaml", "--allow-code", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_a_recipe_trains_its_own_classes(project):
    """Callback, model and data set come from the file beside the recipe, which is imported once."""
    weights = load_file(project / "runs" / "my" / "model" / "model.safetensors")

    assert (project / "counted.txt").read_text().split() == [str(step) for step in range(1, 9)]
    assert weights["layers.0.weight"].shape == (8, 4)
    assert (project / IMPORTED).read_text() == "imported\n"
    result = json.loads((project / "runs" / "my" / "result.json").read_text())
    assert result["metrics"]["eval_loss"] > 0


def test_the_run_says_what_it_imported(project):
    """``run.json`` has the SHA-256 of each file beside the recipe, as sha256sum computes it."""
    facts = json.loads((project / "runs" / "my" / "run.json").read_text())

    assert facts["code"] == {
        "folder": "../..",
        "sha256": {
            name: hashlib.sha256((project / f"{name}.py").read_bytes()).hexdigest()
            for name in ("my_parts", "my_helpers")
        },
    }


def test_a_run_resumes_bitwise_from_its_copy(project):
    """The copy of a recipe in the run folder finds the module, and repeats the end of the run."""
    run = project / "runs" / "my"
    file = run / "model" / "model.safetensors"
    before = file.read_bytes()
    file.unlink()

    resumed = command(
        *("train", run / "recipe.yaml", "--allow-code", "--resume", run / "checkpoint-4"),
        *("--set", f"training.output_dir={run}"),
        cwd=project,
    )

    assert resumed.returncode == 0, resumed.stderr
    assert file.read_bytes() == before
    assert "changed" not in resumed.stderr
    steps = [str(step) for step in (*range(1, 9), *range(5, 9))]
    assert (project / "counted.txt").read_text().split() == steps


def test_the_card_loads_the_weights(project, monkeypatch):
    """The code on the card of a model loads the weights into an object of the user's class."""
    folder = project / "runs" / "my" / "model"
    card = (folder / "README.md").read_text(encoding="utf-8")
    code = card.partition("```python\n")[2].partition("```")[0]
    network = load_recipe(project / "my.yaml", allow_code=True).model.make()
    monkeypatch.chdir(folder)

    exec(code, {"model": network})  # noqa: S102  (the code of the card)

    saved = load_file("model.safetensors")
    assert all(torch.equal(saved[name], one) for name, one in network.state_dict().items())
    assert "This needs its author's own code, `my_parts.Net`" in card
    assert "`mfwrap train --allow-code`" in card
    assert str(project) not in card


@pytest.mark.parametrize("files", [["cb.py"], ["cb/__init__.py"], ["__init__.py", "cb.py"]])
def test_a_module_in_a_folder(tmp_path, files):
    """The copy of the recipe finds a module in a folder, with and without ``__init__.py``."""
    recipe = write_project(tmp_path, callbacks=[{"type": "parts.cb.Count", "file": "counted.txt"}])
    for name in files:
        (tmp_path / "parts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "parts" / name).write_text("from my_parts import Count\n")
    run = tmp_path / "run"
    code = load_recipe(recipe, [f"training.output_dir={run}"], allow_code=True).code
    facts = code.facts(run)
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe.read_text())
    (run / "run.json").write_text(json.dumps({"code": facts}))

    copied = load_recipe(run / "recipe.yaml", allow_code=True)

    assert facts["folder"] == ".."
    assert copied.code.facts(run) == facts
    assert (None in facts["sha256"].values(), "parts.cb" in facts["sha256"]) == (False, True)


def test_a_run_is_reported_without_its_code(project):
    """``report``, ``verify``, ``plot`` and ``compare`` import nothing."""
    before = (project / IMPORTED).read_text()
    for words in (["report"], ["verify"], ["plot"], ["compare", "runs/my"]):
        assert command(*words, "runs/my", cwd=project).returncode == 0

    assert (project / "runs" / "my" / "run.html").is_file()
    assert (project / IMPORTED).read_text() == before


@pytest.mark.parametrize(
    "words",
    [
        ["train", "my.yaml"],
        ["train", "my.yaml", "--resume=auto"],
        ["train", "my.yaml", "--overwrite"],
        ["validate", "my.yaml"],
        ["data", "my.yaml"],
        ["import-mindformers", "my.yaml"],
        ["init", "my.yaml", "--output", "new.yaml"],
    ],
    ids=" ".join,
)
def test_nothing_is_imported_without_the_flag(tmp_path, monkeypatch, words):
    """No command imports the module, also where the current folder has it."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(SystemExit):
        main(words)

    assert not (tmp_path / IMPORTED).exists()
    assert not (tmp_path / "runs").exists()


def test_train_names_the_flag(tmp_path, capsys):
    """Without the flag, ``train`` says in one sentence what to pass."""
    recipe = write_project(tmp_path)

    with pytest.raises(SystemExit) as left:
        main(["train", str(recipe), "--set", f"training.output_dir={tmp_path / 'run'}"])

    assert left.value.code == 2
    assert capsys.readouterr().err == (
        f"mfwrap: {recipe}:3: model.type: my_parts.Net is Python code that the recipe names; pass "
        "--allow-code to run it (in Python: load_recipe(..., allow_code=True))\n"
    )


def test_validate_says_what_it_could_not_check(tmp_path, capsys):
    """Without the flag, ``validate`` checks the rest, and names the sections that are left."""
    recipe = write_project(
        tmp_path, optimizer={"type": "my_parts.Sign"}, lr_schedule={"type": "my_parts.falling"}
    )
    for words, code in ((["--set", "training.max_steps=often"], 2), ([], 0)):
        with pytest.raises(SystemExit) as left:
            main(["validate", str(recipe), *words])
        assert left.value.code == code

    said = capsys.readouterr()
    assert "training.max_steps: expected an integer" in said.err
    assert said.out == (
        f"{recipe}: valid, except what only --allow-code checks: model (my_parts.Net), data "
        "(my_parts.Rows), optimizer (my_parts.Sign), lr_schedule (my_parts.falling), callbacks.0 "
        "(my_parts.Count); its first step was not tried, because its data come from the code of "
        "my_parts.Rows, which runs only with --allow-code\n"
    )


def test_a_callback_of_pynative_is_adapted(tmp_path):
    """A class with the methods of PyNative's callbacks gets their arguments."""
    file = tmp_path / "losses.txt"
    callbacks = [{"type": "my_parts.Losses", "file": str(file)}]
    recipe = checked(tmp_path, f"training.output_dir={tmp_path / 'run'}", callbacks=callbacks)

    run_recipe(recipe)

    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, records) if "global_norm" in record]
    lines = [line.split() for line in file.read_text().splitlines()]
    assert [step for step, _ in lines] == [f"{step}/8" for step in range(1, 9)]
    assert [float(loss) for _, loss in lines] == pytest.approx(losses, rel=1e-6)


def test_the_first_step_is_tried_without_an_own_callback(tmp_path, capsys):
    """If only a callback is the user's own, ``validate`` tries the step without it."""
    recipe = write_project(
        tmp_path,
        model={"config": {"model_type": "perceptron", "hidden_size": 4, "num_hidden_layers": 1}},
        data={"type": "diabetes"},
    )

    with pytest.raises(SystemExit):
        main(["validate", str(recipe)])

    assert capsys.readouterr().out.endswith("--allow-code checks: callbacks.0 (my_parts.Count)\n")


def test_validate_with_the_flag_tries_the_step(tmp_path, capsys, monkeypatch):
    """With the flag, ``validate`` finds a model that returns no loss."""
    monkeypatch.chdir(tmp_path)
    recipe = write_project(tmp_path)
    said = []
    for name in ("Net", "ScalarNet", "VectorNet"):
        with pytest.raises(SystemExit):
            main(["validate", str(recipe), "--allow-code", "--set", f"model.type=my_parts.{name}"])
        output = capsys.readouterr()
        said.append(output.out + output.err)

    wanted = (
        'expected a model whose forward returns a dictionary with "loss", or a tuple that begins'
    )
    assert said[0] == f"{recipe}: valid\n"
    assert wanted in said[1]
    assert said[1].endswith("got no loss from my_parts.ScalarNet\n")
    assert wanted in said[2]
    assert said[2].endswith("got shape (2,) from my_parts.VectorNet\n")


def test_rows_are_shown(tmp_path, capsys):
    """``data`` shows the inputs of the model, with the ranges of their values."""
    recipe = write_project(tmp_path)

    with pytest.raises(SystemExit) as left:
        main(["data", str(recipe), "--allow-code", "--rows", "2"])

    said = capsys.readouterr().out.splitlines()
    assert left.value.code == 0
    assert [line for line in said if line.startswith("row")] == ["row 1", "row 2"]
    assert sum("features         (4,) float32, values from " in line for line in said) == 2
    assert said[-1] == "as one batch: features (2, 4), labels (2,)"


def test_a_task_with_a_source_and_a_metric(tmp_path):
    """A task of the user's own has its columns, its source and its metric."""
    sections = {"task": "my_parts.TASK", "model": {"type": "my_parts.Scale"}}
    overrides = [f"training.output_dir={tmp_path / 'run'}", "callbacks=[]"]
    data = {"type": "my_parts.Squares", "number": 20, "eval_fraction": 0.25}

    result = run_recipe(checked(tmp_path, *overrides, **sections, data=data))

    assert result.metrics["eval_rows"] == 5
    shown = preview(checked(tmp_path, **sections, data=data, callbacks=None), 1)
    assert shown[0] == "row 1"
    assert re.fullmatch(r"  x +\(\) float32, values from (\d+) to \1", shown[1])
    said = refused(tmp_path, *overrides, "data.number=3", **sections, data=data)
    assert said == "--set data.number: must be >= 4, got 3"
    file = tmp_path / "my.yaml"
    with pytest.raises(RecipeError) as error:
        load_recipe(file)
    assert str(error.value).startswith(f"{file}:1: task: my_parts.TASK is Python code that")


def test_trl_trains_models_of_transformers(tmp_path):
    """A model that TRL could not train is refused before the training."""
    recipe = checked(
        tmp_path,
        *(f"training.output_dir={tmp_path / 'run'}", "callbacks=[]"),
        task="supervised_tuning",
        data={"type": "docstrings", "max_train_samples": 4},
    )

    with pytest.raises(RecipeError, match=r"model.type: expected a transformers.PreTrainedModel"):
        run_recipe(recipe)


def test_a_schedule_of_groups(tmp_path):
    """A group needs a formula: a schedule of torch is refused, with the flag and without it."""
    section = {"default": {"type": "my_parts.falling"}, "grouped": []}
    recipe = write_project(tmp_path, grouped_lr_schedule=section)

    unchecked = load_recipe(recipe).unchecked
    said = refused(tmp_path, grouped_lr_schedule=section)

    assert unchecked["grouped_lr_schedule", "default", "type"] == "my_parts.falling"
    assert "expected a subclass of mfwrap.schedules.formula.FormulaLR" in said


def test_nothing_is_left_behind(tmp_path):
    """After a recipe was loaded and run, no path and no module of it is left in the process."""
    path, modules = sys.path[:], {*sys.modules}

    run_recipe(checked(tmp_path, f"training.output_dir={tmp_path / 'run'}", "callbacks=[]"))

    assert sys.path == path
    assert not {name for name in {*sys.modules} - modules if name.startswith("my_")}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("my_parts")


def test_two_recipes_with_modules_of_one_name(tmp_path):
    """Each recipe gets the module of its own folder, in any order."""
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        found.append(checked(tmp_path / name))

    files = [recipe.model.make.args[1].__init__.__code__.co_filename for recipe in found]

    assert files == [str(tmp_path / name / "my_parts.py") for name in ("first", "second")]


def test_a_class_is_pickled_for_data_workers(tmp_path):
    """Workers that are not forked import the module from beside the recipe."""
    recipe = checked(
        tmp_path,
        *(f"training.output_dir={tmp_path / 'run'}", "training.dataloader_num_workers=1"),
        *("training.max_steps=2", "callbacks=[]"),
    )
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        run_recipe(recipe)
    finally:
        torch.multiprocessing.set_start_method(before, force=True)

    assert (tmp_path / IMPORTED).read_text().count("imported") >= 2


def test_an_installed_class(tmp_path):
    """A class of an installed package needs no file beside the recipe."""
    recipe = checked(
        tmp_path,
        "training.learning_rate=0.02",
        "optimizer={type: torch.optim.SGD, lr: 0.02, momentum: 0.5}",
    )
    network = torch.nn.Linear(2, 2)

    built = recipe.optimizer.build(recipe.arguments, network, ["weight"])

    assert type(built) is torch.optim.SGD
    assert built.defaults["lr"] == recipe.arguments.learning_rate == 0.02
    assert built.defaults["momentum"] == 0.5


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("callbacks.0.type=my_parts.Cuont", "has no 'Cuont'; did you mean 'Count'?"),
        ("callbacks.0.type=my_part.Count", "got 'my_part'; did you mean 'my_parts'?"),
        (
            "callbacks.0.type=my_parts.Net",
            "or of Callback or PyNativeCallback of mfwrap.callbacks, got",
        ),
        ("callbacks.0.type=my_parts..Net", "expected module.Name, got 'my_parts..Net'"),
        ("model.type=my_parts.Rows", "expected a subclass of torch.nn.Module, or a function"),
        ("data.type=my_parts.Count", "expected a class of data sets, with __getitem__"),
        ("optimizer={type: my_parts.Net}", "expected a subclass of torch.optim.Optimizer"),
        ("lr_schedule={type: my_parts.Net}", "expected a subclass of torch.optim.lr_scheduler"),
        ("optimizer={type: my_parts.nothing}", "but my_parts.nothing built a NoneType"),
        ("lr_schedule={type: my_parts.nothing}", "but my_parts.nothing built a NoneType"),
        ("task=my_parts.Net", "expected a Task of mfwrap.recipes.tasks.table, got my_parts.Net"),
        ("callbacks.0.evry=2", "--set callbacks.0.evry: unknown key; did you mean 'every'?"),
        ("callbacks.0.every=often", "callbacks.0.every: expected an integer, got 'often'"),
        ("model={type: my_parts.Net}", "model.hidden: required, but missing"),
        ("model.dtype=int8", "--set model.dtype: expected"),
        ("data.nubmer=3", "--set data.nubmer: unknown key; did you mean 'number'?"),
        ("optimizer={type: my_parts.Sign, lr: -1}", "optimizer.lr: expected a number >= 0, got -1"),
        ("optimizer={type: my_parts.Sign, params: 1}", "optimizer.params: unknown key"),
        ("lr_schedule={type: my_parts.falling, powr: 2}", "did you mean 'power'?"),
    ],
)
def test_what_is_refused(tmp_path, override, wanted):
    """A wrong module, name, kind or argument is an error with its place, before the training."""
    assert wanted in refused(tmp_path, override)


def test_a_refusal_has_file_and_line(tmp_path):
    """The place of an error is the line of the recipe."""
    callbacks = [{"type": "my_parts.Count", "file": "counted.txt", "evry": 2}]

    said = refused(tmp_path, callbacks=callbacks)

    line = (tmp_path / "my.yaml").read_text().splitlines().index("  evry: 2") + 1
    assert said.startswith(f"{tmp_path / 'my.yaml'}:{line}: callbacks.0.evry: unknown key")


def test_a_constructor_that_refuses(tmp_path):
    """An error of a constructor names the key, or the line of the user's own code."""
    said = []
    for name in ("Refusing", "Failing"):
        overrides = [f"callbacks=[{{type: my_parts.{name}, limit: 4}}]"]
        recipe = checked(tmp_path, f"training.output_dir={tmp_path / name}", *overrides)
        with pytest.raises(RecipeError) as error:
            run_recipe(recipe)
        said.append(str(error.value))

    lines = (tmp_path / "my_parts.py").read_text().splitlines()
    line = lines.index("        [][limit]") + 1
    assert said[0].endswith("callbacks.0.limit: must be a prime number, got 4")
    assert said[1].endswith(
        f"callbacks.0: failed with IndexError at {tmp_path / 'my_parts.py'}:{line}: list index out "
        "of range"
    )


_FAILING = """
from torch import nn, optim
from transformers import TrainerCallback

from mfwrap.recipes.data.source import DataSource


class Odd(Exception):
    pass


def fail(*args, **settings):
    raise Odd("no")


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, features, labels):
        fail()


class Rows:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        fail()


class Callback(TrainerCallback):
    def __init__(self):
        fail()


class Source(DataSource):
    def __post_init__(self):
        fail()

    def read(self):
        pass


class Optimizer(optim.SGD):
    def step(self, closure=None):
        fail()
"""


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("optimizer={type: failing.fail}", "optimizer"),
        ("optimizer={type: failing.Optimizer}", "training"),
        ("lr_schedule={type: failing.fail}", "lr_schedule"),
        ("callbacks=[{type: failing.Callback}]", "callbacks.0"),
        ("model={type: failing.fail}", "model"),
        ("data={type: failing.fail}", "data"),
        ("data={type: failing.Source}", "data"),
        ("metric={type: failing.Callback}", "metric"),
    ],
)
def test_an_exception_of_an_own_class(tmp_path, monkeypatch, capsys, override, name):
    """Whatever class an error has, the command line says in one line where it was raised."""
    monkeypatch.chdir(tmp_path)
    recipe = write_project(tmp_path, callbacks=None)
    file = tmp_path / "failing.py"
    file.write_text(_FAILING, encoding="utf-8")
    line = _FAILING.splitlines().index('    raise Odd("no")') + 1

    with pytest.raises(SystemExit) as left:
        main(["train", str(recipe), "--allow-code", "--set", override])

    assert left.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f" {name}: failed with Odd at {file}:{line}: no")


@pytest.mark.parametrize(
    ("command", "override", "says"),
    [
        ("validate", "model={type: failing.Net}", "the first step fails"),
        ("validate", "data={type: failing.Rows}", "the first step fails"),
        ("data", "data={type: failing.Rows}", "the data cannot be prepared"),
    ],
)
def test_the_line_that_fails_in_the_first_step(tmp_path, capsys, command, override, says):
    """``validate`` and ``data`` name the file and line of the user's own code."""
    recipe = write_project(tmp_path, callbacks=None)
    file = tmp_path / "failing.py"
    file.write_text(_FAILING, encoding="utf-8")
    line = _FAILING.splitlines().index('    raise Odd("no")') + 1
    words = [command, str(recipe), "--allow-code", "--set", override]

    with pytest.raises(SystemExit) as left:
        main([*words, "--set", f"training.output_dir={tmp_path / 'run'}"])

    assert left.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"mfwrap: {recipe}: {says}: Odd at {file}:{line}: no"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import no_such_module\n", "ModuleNotFoundError at {file}:1: No module named"),
        ("x = 1\nraise SystemExit(3)\n", "SystemExit at {file}:2: 3"),
        ("def f(:\n", "SyntaxError at {file}:1: "),
    ],
)
def test_a_module_that_cannot_be_imported(tmp_path, text, wanted):
    """The error of an import names the file and the line of the user's own code."""
    recipe = write_project(tmp_path)
    file = tmp_path / "broken.py"
    file.write_text(text)

    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, ["model.type=broken.Net"], allow_code=True)

    assert f"the module 'broken' cannot be imported: {wanted.format(file=file)}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "of"),
    [("queue", "a module of Python's standard library"), ("safetensors", "also the module /")],
)
def test_a_module_with_the_name_of_another(tmp_path, name, of):
    """A file beside the recipe that has the name of another module is refused, and not imported."""
    recipe = write_project(tmp_path)
    file = tmp_path / f"{name}.py"
    file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")

    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, [f"model.type={name}.Net"], allow_code=True)

    assert f"{file} must have another name, because '{name}' is {of}" in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_a_changed_file_is_said(tmp_path):
    """A run that resumes with a changed module continues, and says so once."""
    overrides = [f"training.output_dir={tmp_path / 'run'}", "callbacks=[]"]
    run_recipe(checked(tmp_path, *overrides))
    with (tmp_path / "my_helpers.py").open("a") as file:
        file.write("# changed\n")
    recipe = load_recipe(tmp_path / "my.yaml", overrides, allow_code=True)
    checkpoint, said = tmp_path / "run" / "checkpoint-4", []

    for _ in range(2):
        run_recipe(recipe, resume=str(checkpoint), say=said.append)

    since = f"since {tmp_path / 'run'} was started"
    resumes = f"resuming from {checkpoint}, step 4 of 8"
    warning = f"warning: my_helpers.py changed {since}; the run continues with it"
    assert said == [warning, resumes, resumes]


def test_the_learning_rate_of_a_schedule(tmp_path):
    """A function builds the schedule; it gets the number of steps, and its rates are recorded."""
    folder = tmp_path / "run"
    recipe = checked(
        tmp_path,
        *(f"training.output_dir={folder}", "callbacks=[]"),
        optimizer={"type": "my_parts.Sign", "lr": 0.01},
        lr_schedule={"type": "my_parts.falling", "power": 2},
    )

    run_recipe(recipe)

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rates = [one["learning_rate"] for one in map(json.loads, lines) if "learning_rate" in one]
    assert rates == pytest.approx([0.01 * (1 - step / 8) ** 2 for step in range(8)])


@pytest.mark.slow
def test_two_ranks(project):
    """On two ranks, half of each batch on each gives the weights of one process."""
    run = project / "runs"
    settings = ["--set", "model.type=my_parts.Net", "--set", "callbacks=[]"]
    settings += ["--set", "training.max_steps=2"]
    # Without dropout, whose random numbers differ on each rank.
    text = (project / "my_parts.py").read_text().replace("Dropout(0.2)", "Dropout(0.0)")
    (project / "my_parts.py").write_text(text)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        free_port(),
    ]
    # The processes are connected on any machine, also if the recipe does not name the device.
    recipe = (project / "my.yaml").read_text().replace("  use_cpu: true\n", "")
    (project / "two.yaml").write_text(recipe)

    both = command(
        *("train", "two.yaml", "--allow-code", *settings),
        *("--set", "training.per_device_train_batch_size=2"),
        cwd=project,
        launcher=launcher,
    )
    alone = command(
        *("train", "two.yaml", "--allow-code", *settings),
        *("--set", f"training.output_dir={run / 'alone'}"),
        cwd=project,
    )

    assert both.returncode == 0, both.stderr
    assert alone.returncode == 0, alone.stderr
    weights = [load_file(run / name / "model" / "model.safetensors") for name in ("two", "alone")]
    for name in weights[0]:
        assert torch.allclose(weights[0][name], weights[1][name], atol=1e-5)


def test_another_thread_imports_a_module(monkeypatch):
    """Modules may be added while those that were imported are looked through."""

    class Name(str):
        """Name of a module; another module is imported as soon as this one is looked at."""

        __slots__ = ()

        def partition(self, separator):
            monkeypatch.setitem(sys.modules, "imported_meanwhile", ModuleType("imported_meanwhile"))
            return super().partition(separator)

    with OwnCode("r.yaml", is_allowed=False).importable():
        monkeypatch.setitem(sys.modules, Name("looked_at"), ModuleType("looked_at"))

    assert {"looked_at", "imported_meanwhile"} <= sys.modules.keys()
