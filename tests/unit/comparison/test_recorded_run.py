"""What a run has recorded is read by file and rank."""

import json

from mfwrap.comparison.recorded_run import read_recorded_run
from support.run_folders import write_lines, write_run, write_trainer_run


def test_sources_and_ranks(tmp_path):
    """Numbers are kept by file and rank; a step that was recorded twice counts once."""
    folder = write_run(tmp_path / "run", num_steps=3, num_ranks=2)
    write_lines(
        folder / "training_state.jsonl",
        [{"step": 1, "local_loss": 1.0}, {"step": 1, "local_loss": 2.0, "losses": {"a": 3}}],
    )
    (folder / "recipe.yaml").write_text("training: {seed: 3, output_dir: x}\n")
    run = read_recorded_run(folder)

    assert run.num_ranks == 2
    assert run.numbers["training_state"][0][1] == {"loss": 2.0, "loss/a": 3.0}
    assert run.numbers["metrics"][1][2] == {
        "local_norm/embed": 1.0,
        "local_norm/layers.0": 2.0,
        "local_norm/layers.1": 3.0,
    }
    assert run.recipe == {"training.seed": 3}
    assert run.facts == {"max_grad_norm": 1.5}
    assert run.steps == {0, 1, 2, 3}


def test_settings_of_a_script(tmp_path):
    """Without a recipe, they are those that the run has noted itself."""
    folder = write_run(tmp_path / "run", num_steps=3)
    facts = {"configuration": {"training": {"learning_rate": 0.2, "output_dir": "x"}}}
    (folder / "run.json").write_text(json.dumps(facts))
    assert read_recorded_run(folder).recipe == {"training.learning_rate": 0.2}


def test_a_trainers_log(tmp_path):
    """The Trainer's log is a source of its own, because it has means over several steps."""
    run = read_recorded_run(write_trainer_run(tmp_path / "run"))

    assert list(run.numbers) == ["trainer_state"]
    assert run.numbers["trainer_state"][0][2]["global_norm"] == 2.0
