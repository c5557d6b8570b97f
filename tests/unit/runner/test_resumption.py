"""With ``resume="auto"`` one call starts a run, resumes it, or returns its result."""

import json
import math
from pathlib import Path

import pytest

from mfwrap.checkpoints.written_files import note_written, rewrite_list
from mfwrap.runner import RecipeError, parse_recipe, run_recipe
from mfwrap.runner.document import RecipeDocument, yaml_text
from mfwrap.runner.folder import RESULT
from mfwrap.runner.resumption import former_run, read_result, result_line, write_result
from support.ranks.recipes import run_again
from support.recipe_texts import recipe_text


def run(folder, overrides=(), **training):
    """Run a small recipe that saves every two steps; return its result and what it said."""
    said = []
    recipe = parse_recipe(small_recipe(folder, **training), "r.yaml", overrides)
    return run_recipe(recipe, resume="auto", say=said.append), said


def small_recipe(folder, **training):
    """Return the text of a recipe that saves every two steps."""
    settings = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(folder)}
    return recipe_text(training=settings | {"logging_steps": 1} | training)


def steps(folder):
    """Return the steps in the records, once for each record."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


def times(folder):
    """Return when each file was changed."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def unfinish(folder):
    """Leave a run folder as if the run had been killed after its last checkpoint."""
    (folder / RESULT).unlink()


def test_start_and_finish(tmp_path):
    """A finished run returns its metrics again, says so, and changes nothing."""
    text = ["training.metric_for_best_model='1e5'"]  # a number if it lost its quotes in the folder
    first, said = run(tmp_path, text)
    assert said == []
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    before = times(tmp_path)

    again, said = run(tmp_path, text)

    assert again == first
    assert said == [f"{tmp_path}: this run has finished before; --overwrite runs it again"]
    assert times(tmp_path) == before


def test_results_that_are_not_finite(tmp_path):
    """The result is JSON for strict parsers, and is read back as it was."""
    metrics = {"eval_loss": math.inf, "eval_r2": -math.inf, "eval_mse": math.nan, "eval_x": 0.5}
    write_result(tmp_path, metrics)

    def refuse(constant):
        pytest.fail(f"{constant} is no JSON")

    json.loads((tmp_path / RESULT).read_text(), parse_constant=refuse)
    found, checkpoint = read_result(tmp_path)
    assert found == pytest.approx(metrics, nan_ok=True)
    assert checkpoint is None


def test_the_line_of_many_metrics():
    """It has the first ones, and says where the others are."""
    metrics = {f"eval_{number}": float(number) for number in range(8)}
    folder = Path("runs/a")

    assert result_line(folder, {}) == "not evaluated"
    assert result_line(folder, metrics).endswith("eval_6 6, eval_7 7")
    more = metrics | {"eval_8": 8.0, "eval_9": 9.0}
    assert result_line(folder, more).endswith("eval_7 7, 2 more in runs/a/result.json")


def test_one_rank_says_that_a_run_has_finished(tmp_path, two_ranks):
    """Only rank 0 says so."""
    run(tmp_path)

    said, nothing = two_ranks.run(run_again, small_recipe(tmp_path))

    assert (len(said), nothing) == (1, [])


def test_one_rank_says_that_a_run_resumes(tmp_path, two_ranks):
    """Only rank 0 says so."""
    text = small_recipe(tmp_path)
    assert two_ranks.run(run_again, text) == [[], []]
    unfinish(tmp_path)

    said = two_ranks.run(run_again, text)

    assert said == [[f"resuming from {tmp_path / 'checkpoint-6'}, step 6 of 6"], []]


def test_killed_before_the_first_checkpoint(tmp_path):
    """Records of a run without checkpoints are deleted, not continued."""
    run(tmp_path / "alone")
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("task: causal_lm\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (folder / "_checkpoint-2.partial").mkdir()
    rewrite_list(folder, ["metrics.jsonl", "recipe.yaml"])

    result, _ = run(folder)

    assert result.metrics == run(tmp_path / "alone")[0].metrics
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in (tmp_path / "alone").iterdir()
    }


def test_killed_after_a_checkpoint(tmp_path):
    """The run is resumed; with a damaged checkpoint, from the one before it.

    Tracebacks of the killed attempt get another name when the run has finished.
    """
    first, _ = run(tmp_path)
    unfinish(tmp_path)
    tracebacks = [f"error_rank_{rank}.txt" for rank in range(2)]
    for name in tracebacks:
        note_written(tmp_path / name)
        (tmp_path / name).write_text(f"Traceback in {name}")
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.warns(UserWarning, match=r"checkpoint-6: .*; resuming from .*checkpoint-4$"):
        result, said = run(tmp_path)

    assert said == [f"resuming from {tmp_path / 'checkpoint-4'}, step 4 of 6"]
    assert result.metrics == first.metrics
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "_abandoned-checkpoint-6").is_dir()
    kept = {path.name: path.read_text() for path in tmp_path.glob("*error_rank_*")}
    assert kept == {f"earlier_{name}": f"Traceback in {name}" for name in tracebacks}


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.learning_rate=0.5", "--set training.learning_rate: the run in {} has 0.01, got"),
        ("training.max_steps=12", "--set training.max_steps: the run in {} has 6, got 12"),
        (
            "model.config.hidden_size=4",
            "--set model.config.hidden_size: the run in {} has 8, got 4",
        ),
        ("ema.decay=0.5", "--set ema.decay: ema: the run in {} has None, got {{'decay': 0.5}}"),
    ],
)
def test_another_recipe(tmp_path, override, says, is_finished):
    """A recipe that differs from that of the folder is refused with the differing key."""
    run(tmp_path)
    if not is_finished:
        unfinish(tmp_path)
    before = times(tmp_path)

    with pytest.raises(RecipeError) as caught:
        run(tmp_path, [override])

    assert str(caught.value).startswith(says.format(tmp_path))
    assert times(tmp_path) == before


def test_a_recipe_that_differs_without_effect(tmp_path):
    """A folder that was moved, and settings of what is printed, do not count."""
    first, _ = run(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")

    assert run(tmp_path / "new", disable_tqdm=False, run_name="again")[0].metrics == first.metrics


def test_a_damaged_recipe(tmp_path):
    """A recipe in the folder that cannot be read is refused like any other."""
    run(tmp_path)
    (tmp_path / "recipe.yaml").write_bytes(b"task: \xff")

    with pytest.raises(RecipeError, match=r"recipe\.yaml:1: expected UTF-8"):
        run(tmp_path)


def test_a_recipe_with_nan(tmp_path):
    """A recipe with NaN equals its copy in the folder."""
    document = RecipeDocument("r.yaml", {"data": {"x": ["1e5", float("nan")]}}, {})
    (tmp_path / "recipe.yaml").write_text(yaml_text(document.data))
    rewrite_list(tmp_path, ["recipe.yaml", "result.json"])
    write_result(tmp_path, {"loss": 0.5})

    assert former_run(document, tmp_path).result == ({"loss": 0.5}, None)


def test_a_result_that_cannot_be_read(tmp_path):
    """A result that exists but cannot be read is an error: the run may have finished."""
    rewrite_list(tmp_path, ["result.json"])
    (tmp_path / "result.json").mkdir()

    with pytest.raises(RecipeError, match=r"Is a directory: .*result\.json"):
        former_run(RecipeDocument("r.yaml", {}, {}), tmp_path)


def test_checkpoints_without_a_recipe(tmp_path):
    """A folder whose recipe is unknown is refused."""
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").touch()

    with pytest.raises(RecipeError, match=r"cannot resume the run in .*: it has no recipe\.yaml"):
        run(tmp_path)
