"""A recipe pushes its complete models, and a failed push can be repeated."""

import json

import pytest
import safetensors.torch

from mfwrap.runner import parse_recipe, run_recipe
from support.hub import TOKEN, client_of, serving
from support.ranks.recipes import run_with_hub
from support.recipe_texts import recipe_text

# The client of the hub uploads large files in a way that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


@pytest.fixture
def hub():
    """Make a stand-in the hub of this process."""
    with serving() as server, client_of(server.url):
        yield server


def pushing(folder, **training):
    """Return the text of a recipe with an average that pushes its models at its end."""
    settings = {
        "output_dir": str(folder),
        "push_to_hub": True,
        "hub_model_id": "user/run",
        "hub_strategy": "end",
        "save_strategy": "steps",
        "save_steps": 3,
    }
    return recipe_text(ema={"decay": 0.5}, training=settings | training)


def run(folder, *, resume=False, **training):
    """Run the recipe."""
    return run_recipe(parse_recipe(pushing(folder, **training), "r.yaml"), resume=resume)


def contents(folder):
    """Return the contents of a folder's files by their names."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_commit_for_each_model(tmp_path, hub):
    """The root of the repository is the raw model, and ``model_ema`` the averaged one."""
    run(tmp_path)

    model, averaged = contents(tmp_path / "model"), contents(tmp_path / "model_ema")
    assert [commit.title for commit in hub.commits] == ["End of training", "Averaged weights"]
    assert hub.commits[0].files == model
    assert hub.commits[1].files == {f"model_ema/{name}": one for name, one in averaged.items()}
    weights = [safetensors.torch.load(one["model.safetensors"]) for one in (model, averaged)]
    assert not weights[0]["head.weight"].equal(weights[1]["head.weight"])
    assert not any(TOKEN.encode() in content for content in hub.files.values())


def test_checkpoints_are_pushed_as_by_the_trainer(tmp_path, hub):
    """With the Trainer's default, its pushes of checkpoints come before those of the models."""
    run(tmp_path, hub_strategy="every_save", hub_always_push=True)

    *of_checkpoints, last, averaged = [commit.title for commit in hub.commits]
    # The Trainer pushes side by side: what comes later and brings nothing new is no commit.
    steps = [f"Training in progress, step {step}" for step in (3, 6)]
    assert sum("/preupload/" in request for request in hub.requests) > 2  # of the two models
    assert set(of_checkpoints) <= set(steps)
    assert (last, averaged) == ("End of training", "Averaged weights")
    assert "README.md" in hub.commits[-2].files
    assert hub.files["model.safetensors"] == contents(tmp_path / "model")["model.safetensors"]
    # The Trainer pushes the run folder, in which nothing is unfinished.
    assert not [name for name in hub.files if "partial" in name]


def test_a_failed_push_is_repeated(tmp_path, hub):
    """A failed push is one sentence, keeps the models, and is repeated without training again."""
    hub.refuses = lambda request: "/commit/" in request and len(hub.commits) == 1
    with pytest.raises(RuntimeError, match=r"cannot push .*model_ema to user/run: .*403") as error:
        run(tmp_path)

    said = str(error.value)
    assert "\n" not in said
    assert "start the run again with --resume=auto, or run: hf upload user/run" in said
    assert f"{tmp_path / 'model_ema'} model_ema" in said
    assert TOKEN not in said
    assert not (tmp_path / "result.json").exists()
    models = [contents(tmp_path / name) for name in ("model", "model_ema")]

    hub.refuses = lambda _: False
    result = run(tmp_path, resume="auto")

    assert [contents(tmp_path / name) for name in ("model", "model_ema")] == models
    # The repository has the first model already.
    assert [commit.title for commit in hub.commits] == ["End of training", "Averaged weights"]
    assert json.loads((tmp_path / "result.json").read_text())["metrics"] == result.metrics
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [one["step"] for one in map(json.loads, lines) if "loss" in one] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_checkpoints_is_not_said_to_resume(tmp_path, hub):
    """Without checkpoints, starting again would train again: only the command is named."""
    hub.refuses = lambda request: "/commit/" in request
    with pytest.raises(RuntimeError, match="to push them, run: hf upload user/run") as error:
        run(tmp_path, save_strategy="no")

    assert "--resume" not in str(error.value)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_one_of_two_ranks_pushes(tmp_path, hub, two_ranks):
    """Rank 0 pushes each model once; if a push fails, both ranks raise an error that says why."""
    hub.refuses = lambda request: "/commit/" in request and len(hub.commits) == 1
    text = pushing(tmp_path)
    said = two_ranks.run(run_with_hub, text, hub.url)

    assert all("cannot push" in one and "model_ema" in one for one in said)
    hub.refuses = lambda _: False
    assert two_ranks.run(run_with_hub, text, hub.url) == ["", ""]
    assert [commit.title for commit in hub.commits] == ["End of training", "Averaged weights"]
