"""A run folder holds one run: older checkpoints raise an error, older records are removed."""

import contextlib
import json
import os
import shutil

import pytest

from mfwrap.callbacks.checkpoint_monitor import rotate_checkpoints
from mfwrap.checkpoints.written_files import LIST, listed_names, note_written, rewrite_list
from mfwrap.runner import RecipeError, parse_recipe
from mfwrap.runner.folder import write_traceback
from mfwrap.runner.run import run_recipe
from support.recipe_data import recipe_of
from support.recipe_texts import recipe_text

SAVING = {"save_strategy": "steps", "save_steps": 3}


def run(folder, *, resume=False, overwrite=False, rate=0.01, **training):
    """Run a small recipe with a monitor into a folder; return the messages about removed files."""
    said = []
    monitor = {"monitor_on": True, "weight_state_format": "jsonl", "step_interval": 1}
    text = recipe_text(
        training={**training, "learning_rate": rate, "output_dir": str(folder), "optim": "sgd"},
        runner_wrapper={"use_clip_grad": True, "max_consecutive_skips": None},
        monitor_config=monitor,
    )
    recipe = parse_recipe(text, "r.yaml")
    run_recipe(recipe, resume=resume, overwrite=overwrite, say=said.append)
    return said


def lines(path):
    """Return the records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    """Return the names and bytes of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_of_another_run_are_refused(tmp_path):
    """The error names the folder and three solutions, and the folder is unchanged."""
    run(tmp_path, **SAVING)
    before = contents(tmp_path)

    with pytest.raises(RecipeError, match=r"^r\.yaml:\d+: training\.output_dir: ") as caught:
        run(tmp_path, **SAVING)
    for word in (str(tmp_path), "checkpoint-6", "--resume", "--set", "--overwrite"):
        assert word in str(caught.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", ["checkpoint-3", "_checkpoint-3.partial/replaced/checkpoint-3"])
def test_a_checkpoint_that_was_being_replaced_counts(tmp_path, place):
    """A checkpoint counts even if a process was killed while the checkpoint was being replaced.

    The checkpoint may then be in ``_checkpoint-3.partial/replaced``.
    """
    (tmp_path / place).mkdir(parents=True)
    rewrite_list(tmp_path, ["checkpoint-3"])

    with pytest.raises(RecipeError, match="checkpoint-3"):
        run(tmp_path)
    run(tmp_path, overwrite=True)
    assert not (tmp_path / place.partition("/")[0]).exists()


def test_records_of_a_run_without_checkpoints_begin_anew(tmp_path):
    """A new run removes the records and pictures of a killed run that has no checkpoints."""
    run(tmp_path, rate=1e30)
    (tmp_path / "result.json").unlink()
    assert (tmp_path / "anomalies.jsonl").exists()
    for name in (
        "run.png",
        "run.html",
        "run.json",
        "progress.jsonl",
        "error_rank_1.txt",
        "earlier_error_rank_1.txt",
        "metrics_rank1.jsonl",
        "memory_rank1.jsonl",
        "memory_snapshot.pickle",
        "rollbacks.json",
        "skip_rows.jsonl",
        "run.png.0123456789abcdef.partial",
    ):
        note_written(tmp_path / name)
        (tmp_path / name).touch()
    note_written(tmp_path / "tensorboard")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1").touch()
    kept = ["notes.txt", "train.jsonl", "my_metrics.jsonl", "run.svg", "run.png.partial"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    assert run(tmp_path, max_steps=4) == []

    assert not (tmp_path / "anomalies.jsonl").exists()
    for name in ("metrics", "training_state"):
        steps = {record["step"] for record in lines(tmp_path / f"{name}.jsonl") if "step" in record}
        assert max(steps) == 4
    steps = [record["step"] for record in lines(tmp_path / "training_state.jsonl")]
    assert steps == sorted(set(steps))
    assert [record["step"] for record in lines(tmp_path / "throughput.jsonl")] == [2, 4]
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {*kept, "tensorboard", "model", "recipe.yaml"}
    assert not left & {"run.png", "run.html", "metrics_rank1.jsonl", "memory_snapshot.pickle"}
    assert not list(tmp_path.glob("*error_rank_1.txt"))
    assert {path.name for path in tmp_path.glob("*.partial")} == {"run.png.partial"}
    assert not list((tmp_path / "tensorboard").iterdir())


def test_overwrite_removes_the_former_run(tmp_path):
    """``overwrite`` removes the earlier run's files, and reports them in one line.

    Resuming then finds the new run's checkpoint.
    """
    run(tmp_path, rate=1e30, **SAVING)
    note_written(tmp_path / "model_ema")
    (tmp_path / "model_ema").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    said = run(tmp_path, overwrite=True, max_steps=3, **SAVING)

    assert len(said) == 1
    for name in ("anomalies.jsonl", "checkpoint-3", "checkpoint-6", "metrics.jsonl", "model_ema"):
        assert name in said[0]
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == [
        "checkpoint-3",
        "checkpoint-best",
    ]
    assert not (tmp_path / "anomalies.jsonl").exists()
    assert not (tmp_path / "model_ema").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    run(tmp_path, resume=True, **SAVING)
    steps = [one["step"] for one in lines(tmp_path / "metrics.jsonl") if "loss" in one]
    assert steps == [1, 2, 3, 4, 5, 6]


FOREIGN = {
    "model": "model/network.py",
    "model_ema": "model_ema/weights.txt",
    "recipe.yaml": "recipe.yaml",
    "metrics.jsonl": "metrics.jsonl",
    "metrics_rank1.jsonl": "metrics_rank1.jsonl",
    "result.json": "result.json",
    "run.json": "run.json",
    "rollbacks.json": "rollbacks.json",
    "checkpoint-3": "checkpoint-3",
}
"""A file of another tool for each name that a run would replace or delete."""


@pytest.mark.parametrize("mode", [{}, {"overwrite": True}, {"resume": "auto"}])
@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_in_the_way(tmp_path, name, mode):
    """A run never replaces, deletes or renames them: it is refused and names them."""
    file = tmp_path / FOREIGN[name]
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"metrics": {"loss": 1.0}}')
    before = contents(tmp_path)

    with pytest.raises(RecipeError) as caught:
        run(tmp_path, **mode)

    assert name in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert contents(tmp_path) == before


def test_files_of_others_that_are_not_in_the_way(tmp_path):
    """What the run does not write stays as it is, also with ``overwrite``."""
    kept = [
        "run.html",
        "run.png",
        "model.py",
        "checkpoint-best/a",
        "tensorboard/events.out.tfevents.1",
    ]
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")

    run(tmp_path, **SAVING)
    run(tmp_path, overwrite=True, **SAVING)

    assert {name: (tmp_path / name).read_text() for name in kept} == dict.fromkeys(kept, "mine")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_traceback_replaces_no_file_of_others(tmp_path, capsys, kind):
    """It is printed instead."""
    file = tmp_path / "error_rank_0.txt"
    if kind == "file":
        file.write_text("mine")
    else:
        file.symlink_to("nothing")
    before = file.lstat()

    assert write_traceback(tmp_path, KeyError("the fault")) is None

    assert "KeyError: 'the fault'" in capsys.readouterr().err
    assert file.lstat() == before
    assert list(tmp_path.iterdir()) == [file]


def test_checkpoints_of_others_are_not_overwritten(tmp_path):
    """A checkpoint beside which there is nothing of mfwrap belongs to another tool."""
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "weights.bin").write_text("mine")

    with pytest.raises(RecipeError, match=r"whose checkpoints mfwrap has written, .*checkpoint-3"):
        run(tmp_path, overwrite=True)

    assert (tmp_path / "checkpoint-3" / "weights.bin").read_text() == "mine"


def test_checkpoints_with_files_of_mfwrap_are_overwritten(tmp_path):
    """A checkpoint shows that mfwrap has written it, also if its run folder has nothing else."""
    run(tmp_path, **SAVING)
    for path in [each for each in tmp_path.iterdir() if not each.name.startswith("checkpoint-")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    run(tmp_path, overwrite=True, max_steps=3, **SAVING)

    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_run_without_a_list(tmp_path):
    """If it has a ``run.json`` of mfwrap, the names that a run writes count as its own."""
    run(tmp_path, **SAVING)
    (tmp_path / LIST).unlink()

    run(tmp_path, overwrite=True, max_steps=3, **SAVING)

    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_without_a_list_is_replaced_twice(tmp_path, monkeypatch, overwrite, is_killed):
    """What a run without a list has left is still mfwrap's when its facts are deleted."""
    run(tmp_path, **(SAVING if overwrite else {}))
    for name in (LIST, *(() if overwrite else ("result.json",))):
        (tmp_path / name).unlink()
    delete = type(tmp_path).unlink

    def delete_until_killed(path, **settings):
        delete(path, **settings)
        if is_killed and path.name == "run.json":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "unlink", delete_until_killed)
        with pytest.raises(Killed) if is_killed else contextlib.nullcontext():
            run(tmp_path, overwrite=overwrite)
    if not overwrite:
        (tmp_path / "result.json").unlink(missing_ok=True)

    run(tmp_path, overwrite=overwrite)
    assert {path.name for path in tmp_path.iterdir()} <= {*listed_names(tmp_path), LIST}


def test_a_finished_run_is_not_started_again(tmp_path):
    """Without checkpoints, too, a finished run keeps its records unless it is overwritten."""
    run(tmp_path)
    before = contents(tmp_path)

    with pytest.raises(RecipeError, match=r"without a finished run, got .*result\.json; delete"):
        run(tmp_path)

    assert contents(tmp_path) == before
    run(tmp_path, overwrite=True)


def test_the_list_has_all_that_a_run_writes(tmp_path):
    """Each name in the folder of a run is in its list, except the list itself."""
    run(tmp_path, rate=1e30, **SAVING)

    listed = set((tmp_path / LIST).read_text().splitlines())
    assert {path.name for path in tmp_path.iterdir()} == listed | {LIST}


def test_a_run_that_cannot_begin_removes_nothing(tmp_path):
    """An error in the data is found before ``overwrite`` removes the earlier run."""
    run(tmp_path / "run", **SAVING)
    before = contents(tmp_path / "run")
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    text = recipe_text(data=None, training={"output_dir": str(tmp_path / "run")})
    text += f"data: {{type: json_lines, path: {tmp_path / 'd.jsonl'}}}\n"

    with pytest.raises(RecipeError, match="expected data with the columns"):
        run_recipe(parse_recipe(text, "r.yaml"), overwrite=True)
    assert contents(tmp_path / "run") == before


def test_overwrite_removes_what_a_killed_rotation_left(tmp_path, monkeypatch):
    """``overwrite`` also removes checkpoints whose deletion by a `CheckpointMonitor` was killed."""
    for step in (3, 6):
        (tmp_path / f"checkpoint-{step}" / "deep").mkdir(parents=True)
    rewrite_list(tmp_path, ["checkpoint-3", "checkpoint-6"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", raise_killed)
        with pytest.raises(Killed):
            rotate_checkpoints(tmp_path, 1, None)

    run(tmp_path, overwrite=True)

    left = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert left == ["model"]


def test_a_killed_overwrite_leaves_no_finished_run(tmp_path, monkeypatch):
    """A run that is killed while it deletes a finished run does not count as finished."""
    run(tmp_path, **SAVING)
    with monkeypatch.context() as patch:
        patch.setattr("mfwrap.runner.folder.remove_checkpoints", raise_killed)
        with pytest.raises(Killed):
            run(tmp_path, overwrite=True, **SAVING)

    assert not (tmp_path / "result.json").exists()
    run(tmp_path, resume="auto", **SAVING)
    assert (tmp_path / "result.json").exists()


class Killed(Exception):  # noqa: N818  (stands for a signal, not for an error)
    """Raised where a test simulates the end of the process."""


def raise_killed(*_, **__) -> None:
    """Simulate the end of the process."""
    raise Killed


def answered(folder, prompts, **training):
    """Run a training by rewards that writes its answers; return the names of their files."""
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "log_completions": True,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "max_completion_length": 2,
    }
    recipe = recipe_of(
        "reward_tuning",
        prompts,
        "reward={type: get_repetition_penalty_reward, ngram_size: 3}",
        **{**settings, **training},
    )
    run_recipe(recipe, overwrite=True)
    return {path.name for path in (folder / "completions").iterdir()}


@pytest.mark.filterwarnings("ignore")  # those that TRL emits
def test_answers_of_an_earlier_run(tmp_path):
    """The answers of an earlier run are removed with its records; those of others stay."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    prompts = {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0}
    folder = tmp_path / "run"
    often, seldom = ([f"completions_{n:05}.parquet" for n in each] for each in ([1, 2, 3, 4], [3]))

    assert answered(folder, prompts, logging_steps=1) == set(often)
    (folder / "completions" / "notes.parquet").write_text("mine")
    assert answered(folder, prompts, logging_steps=3, max_steps=3) == {*seldom, "notes.parquet"}

    other = tmp_path / "other"
    (other / "completions").mkdir(parents=True)
    (other / "completions" / often[1]).write_text("not of mfwrap")
    assert answered(other, prompts, logging_steps=3, max_steps=3) == {*seldom, often[1]}
    assert answered(other, prompts, logging_steps=3, max_steps=3) == {*seldom, often[1]}
    assert (other / "completions" / often[1]).read_text() == "not of mfwrap"
