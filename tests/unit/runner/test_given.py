"""Objects that a program passes to `run_recipe` replace sections of the recipe."""

import functools
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback

from mfwrap.cli import main
from mfwrap.records.run_record import read_facts
from mfwrap.runner import RecipeError, RecipeWarning, load_recipe, run_recipe

# Ignore the warnings of the Trainer.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """A linear regression that starts at zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, features, labels):
        return (nn.functional.mse_loss(self.layer(features).squeeze(-1), labels),)


class Rows(Dataset):
    """Equal rows, so that every update sees the same gradient."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"features": torch.tensor([1.0, 2.0]), "labels": torch.tensor(4.0)}


class Steps(TrainerCallback):
    """Remember the steps of a run."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def write_recipe(folder, **sections) -> Path:
    """Write a recipe without model and data; its run folder is ``run``."""
    training = {
        "output_dir": str(folder / "run"),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    recipe = {"task": "regression", "training": training} | sections
    folder.mkdir(exist_ok=True)
    file = folder / "r.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def weight_of(folder):
    """Return the trained weights."""
    return load_file(folder / "run" / "model" / "model.safetensors")["layer.weight"]


@pytest.mark.parametrize("is_built", [False, True])
def test_objects_are_trained(tmp_path, is_built):
    """One step of SGD on the squared error of zero weights adds ``2 lr y x`` to them."""
    network, seen = Net(), Steps()
    sgd = functools.partial(torch.optim.SGD, lr=0.25)

    result = run_recipe(
        write_recipe(tmp_path),
        model=network,
        data=Rows(),
        optimizer=sgd(network.parameters()) if is_built else sgd,
        callbacks=[seen],
    )

    assert weight_of(tmp_path).tolist() == [[2.0, 4.0]]
    assert network.layer.weight.tolist() == [[2.0, 4.0]]
    assert seen.steps == [1]
    assert result.metrics["eval_loss"] == (10.0 - 4.0) ** 2


class Unevaluated(Net):
    """A network that can only be trained."""

    def forward(self, features, labels):
        if not self.training:
            msg = "no evaluation"
            raise ArithmeticError(msg)
        return super().forward(features, labels)


def test_an_evaluation_after_the_last_step_fails(tmp_path):
    """``run.json`` says so; the training alone was finished."""
    with pytest.raises(ArithmeticError, match="no evaluation"):
        run_recipe(write_recipe(tmp_path), model=Unevaluated(), data=Rows())

    assert read_facts(tmp_path / "run")["state"] == "failed after its last step (ArithmeticError)"


def test_a_function_gets_the_learning_rate(tmp_path):
    """A function with a parameter ``lr`` gets that of the recipe."""
    recipe = write_recipe(tmp_path)
    loaded = yaml.safe_load(recipe.read_text())
    loaded["training"]["learning_rate"] = 0.5
    recipe.write_text(yaml.safe_dump(loaded))

    run_recipe(recipe, model=Net(), data=(Rows(), Rows()), optimizer=torch.optim.SGD)

    assert weight_of(tmp_path).tolist() == [[4.0, 8.0]]


def test_objects_replace_sections_of_a_checked_recipe(tmp_path):
    """Sections are replaced and callbacks added, and the copy of the recipe says so."""
    recipe = load_recipe(
        write_recipe(
            tmp_path,
            model={"config": {"model_type": "perceptron", "hidden_size": 4}},
            data={"type": "diabetes", "eval_fraction": 0},
            optimizer={"type": "AdamW", "learning_rate": 1e-3},
            callbacks=[{"type": "MFLossMonitor"}],
        )
    )
    model, seen = Net(), Steps()

    result = run_recipe(
        recipe,
        model=model,
        data=Rows(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.25),
        callbacks=[seen],
    )

    assert (seen.steps, result.metrics) == ([1], {})
    written = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert written["model"] == {"type": f"object of {__name__}.Net"}
    assert written["data"] == {"type": f"object of {__name__}.Rows", "eval_fraction": 0}
    assert written["optimizer"] == {"type": "object of torch.optim.sgd.SGD"}
    assert [one["type"] for one in written["callbacks"]] == [
        "MFLossMonitor",
        f"object of {__name__}.Steps",
    ]


def test_ignored_keys_are_warned_of(tmp_path):
    """A file that is read for a run with objects warns of the same keys as without them."""
    recipe = write_recipe(tmp_path, callbacks=[{"type": "SummaryMonitor"}])

    with pytest.warns(RecipeWarning, match=r"no effect in mfwrap: callbacks.0 \(SummaryMonitor\)"):
        run_recipe(recipe, model=Net(), data=Rows())


def test_a_table_is_prepared_by_the_task(tmp_path):
    """A list of dictionaries has the columns of the task, and is checked like a file."""
    recipe = write_recipe(tmp_path)
    rows = [{"features": [1.0, 2.0], "target": 4.0}] * 8

    run_recipe(
        recipe, model=Net(), data=rows, optimizer=functools.partial(torch.optim.SGD, lr=0.25)
    )

    assert weight_of(tmp_path).tolist() == [[2.0, 4.0]]
    with pytest.raises(RecipeError, match="expected data with the columns"):
        run_recipe(recipe, model=Net(), data=[{"features": [1.0]}], overwrite=True)


def test_the_copy_of_the_recipe_needs_the_program(tmp_path, capsys):
    """The command line cannot run the copy of a recipe that got objects, and says why."""
    run_recipe(write_recipe(tmp_path), model=Net(), data=Rows())

    with pytest.raises(SystemExit):
        main(["validate", str(tmp_path / "run" / "recipe.yaml"), "--allow-code"])

    said = capsys.readouterr().err
    assert "must be passed to run_recipe again, by the program that started the run, got" in said


@pytest.mark.parametrize(
    ("objects", "error", "wanted"),
    [
        ({"model": Net}, TypeError, "`model` must be a torch.nn.Module, got type"),
        ({"optimizer": "SGD"}, TypeError, "`optimizer` must be a torch.optim.Optimizer or"),
        ({"callbacks": [Steps]}, TypeError, "`callbacks` must be objects of"),
        ({"callbacks": Steps()}, TypeError, "`callbacks` must be a list of .*, got Steps"),
        ({"data": iter([])}, RecipeError, "data.type: must give .*, got a builtins.list_iterator"),
        ({"data": (x for x in ())}, RecipeError, "data.type: must .*, got a builtins.generator"),
        ({"data": DataLoader(Rows())}, RecipeError, r"must give .*, got a torch.*\.DataLoader"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, ValueError, "pass `model`, too"),
    ],
)
def test_what_is_refused(tmp_path, objects, error, wanted):
    """An object of a wrong type is refused before the run."""
    defaults = {"model": Net(), "data": Rows()} if "data" in objects else {"data": Rows()}
    with pytest.raises(error, match=wanted):
        run_recipe(write_recipe(tmp_path), **defaults | objects)

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"peft": {"type": "lora"}}, "peft: must be left out, .* got the object `model`"),
        (
            {"lr_schedule": {"type": "cosine", "learning_rate": 1}},
            "lr_schedule.learning_rate: must",
        ),
        ({"grouped_lr_schedule": {"default": {}, "grouped": []}}, "got the object `optimizer`"),
        ({"training": {"weight_decay": 0.1}}, "training.weight_decay: must be left out"),
        ({"data": {"eval_fracton": 0.5}}, "eval_fracton: unknown key; did you mean 'eval_fraction"),
        (
            {"data": {"type": "object of a.B", "nubmer": 1}},
            "data.nubmer: unknown key",
        ),
        ({"model": {"dtipe": "x"}}, "model.dtipe: unknown key; did you mean 'dtype'?"),
        (
            {"optimizer": {"type": "AdamW", "lerning_rate": 1}},
            "optimizer.lerning_rate: unknown key; did you mean 'learning_rate'?",
        ),
        ({"optimizer": {"weight_decay": 0.1}}, "optimizer.weight_decay: must be left out, .*"),
    ],
)
def test_sections_that_contradict_an_object(tmp_path, sections, wanted):
    """A section that would have no effect, or change the object, is refused."""
    network = Net()
    optimizer = torch.optim.SGD(network.parameters())
    with pytest.raises(RecipeError, match=wanted):
        run_recipe(
            write_recipe(tmp_path, **sections), model=network, data=Rows(), optimizer=optimizer
        )


def test_settings_of_a_replaced_optimizer_are_named(tmp_path):
    """A section of another optimizer is replaced; a warning names its settings."""
    section = {"type": "Muon", "learning_rate": 1e-3, "nesterov": True, "weight_decay": None}
    recipe = write_recipe(tmp_path, optimizer=section)
    says = "so these settings have no effect: optimizer.learning_rate, optimizer.nesterov$"

    with pytest.warns(RecipeWarning, match=f"got the object `optimizer`, {says}"):
        run_recipe(recipe, model=Net(), data=Rows(), optimizer=torch.optim.SGD)


def test_settings_of_a_function_that_builds_the_optimizer(tmp_path):
    """A section that names no optimizer has the settings of the function."""
    groups = []

    def sgd(parameters, lr, momentum=0.0):
        groups.extend(parameters)
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum)

    settings = {"learning_rate": 0.5, "momentum": 0.5, "weight_decay": 0.1}
    section = {**settings, "weight_decay_exclude": ["layer.*"]}
    run_recipe(write_recipe(tmp_path, optimizer=section), model=Net(), data=Rows(), optimizer=sgd)

    assert weight_of(tmp_path).tolist() == [[4.0, 8.0]]  # as without weight decay
    assert [(one["momentum"], one["weight_decay"]) for one in groups if one["params"]] == [
        (0.5, 0.0)
    ]
    recipe = write_recipe(tmp_path / "wrong", optimizer={"momntum": 0.5})
    with pytest.raises(RecipeError, match=r"optimizer.momntum: unknown key; did you mean"):
        run_recipe(recipe, model=Net(), data=Rows(), optimizer=sgd)
    recipe = write_recipe(tmp_path / "wrong", optimizer={"learning_rate": 0.5})
    with pytest.raises(RecipeError, match=r"optimizer.learning_rate: must be left out"):
        run_recipe(
            recipe, model=Net(), data=Rows(), optimizer=functools.partial(torch.optim.SGD, lr=1)
        )


def test_an_optimizer_of_the_trainer_contradicts(tmp_path):
    """``training.optim`` and an optimizer exclude each other."""
    recipe = write_recipe(tmp_path, training={"optim": "sgd", "use_cpu": True, "max_steps": 1})

    with pytest.raises(RecipeError, match=r"training.optim: must be left out"):
        run_recipe(recipe, model=Net(), data=Rows(), optimizer=torch.optim.SGD)
