"""`mfwrap average` builds averages in another process, and refuses in one sentence."""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from mfwrap.cli import main
from mfwrap.runner import parse_recipe
from mfwrap.runner.run import run_recipe
from support.recipe_texts import recipe_text

SECTIONS = {
    "ema": {"sigma_rel": [0.05, 0.1]},
    "callbacks": [{"type": "EMACallback", "snapshot_every": 1}],
    "training": {"max_steps": 12, "save_strategy": "steps", "save_steps": 4},
}


def called(capsys, *words):
    """Call the command in this process; return its exit code, its output and its errors."""
    with pytest.raises(SystemExit) as left:
        main(["average", *map(str, words)])
    out, err = capsys.readouterr()
    return left.value.code, out, err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of a recipe, and its metrics."""
    folder = tmp_path_factory.mktemp("recipe") / "run"
    recipe = parse_recipe(recipe_text(**SECTIONS), "r.yaml", [f"training.output_dir={folder}"])
    return folder, run_recipe(recipe).metrics


def test_in_another_process(run):
    """The average of a length that the training has kept is the one in `model_ema`."""
    folder, metrics = run
    command = [sys.executable, "-m", "mfwrap", "average", str(folder), "--sigma", "0.05"]
    done = subprocess.run(
        [*command, "--evaluate"], check=True, capture_output=True, text=True, timeout=300
    )

    expected = load_file(folder / "model_ema" / "model.safetensors")
    got = load_file(folder / "model_sigma_0.05" / "model.safetensors")
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)
    written, evaluated = done.stdout.splitlines()
    assert written.startswith(f"wrote {folder / 'model_sigma_0.05'} from 24 stored sets of weights")
    results = dict(each.split() for each in evaluated.split(", "))
    assert float(results["ema_eval_loss"]) == pytest.approx(metrics["ema_eval_loss"], rel=1e-4)
    assert done.stderr == ""


def test_the_last_checkpoints(run, tmp_path, capsys):
    """`--last` is the mean of the last checkpoints; a damaged one is named and left out."""
    folder, _ = run
    code, out, err = called(capsys, folder, "--last", 2, "--out", tmp_path / "mean")
    stored = [load_file(folder / f"checkpoint-{step}/model.safetensors") for step in (8, 12)]
    got = load_file(tmp_path / "mean" / "model.safetensors")

    assert (code, err) == (0, "")
    assert out == f"wrote {tmp_path / 'mean'} from 2 stored sets of weights\n"
    for name, value in got.items():
        torch.testing.assert_close(value, (stored[0][name] + stored[1][name]) / 2)

    weights = folder / "checkpoint-8" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = called(capsys, folder, "--last", 3)
    weights.write_bytes(content)
    assert code == 2
    assert "checkpoint-8 is left out: model.safetensors is damaged" in err
    assert err.endswith("must have 3 intact checkpoints with weights in safetensors files, got 2\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sigma", "0.3"], "`sigma_rel` must be in (0, 0.2886], got 0.3"),
        (["--sigma", "0.001"], "is out of the range of the 24 averages"),
        (["--sigma", "0.1", "--output", "{run}/model"], "exists already; choose another folder"),
        ([], "give either --sigma, perhaps with --at, or --last."),
        (["--sigma", "0.1", "--last", "2"], "give either --sigma, perhaps with --at, or --last."),
        (["--last", "2", "--at", "2"], "give either --sigma, perhaps with --at, or --last."),
    ],
)
def test_one_sentence(run, capsys, words, message):
    """What cannot be built is one line on standard error, with exit code 2."""
    folder, _ = run
    code, out, err = called(capsys, folder, *(word.format(run=folder) for word in words))

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_without_averages(tmp_path, capsys):
    """A missing folder, and one without averages, recipe or checkpoints, are refused."""
    assert "there is no such folder" in called(capsys, tmp_path / "none", "--last", 1)[2]
    code, _, err = called(capsys, tmp_path, "--sigma", 0.1)
    assert code == 2
    assert "has no power-function averages; train with `sigma_rel`" in err


def test_an_evaluation_without_a_recipe(run, tmp_path, capsys):
    """It is refused before anything is written."""
    shutil.copytree(run[0], tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").unlink()
    code, out, err = called(capsys, tmp_path / "run", "--last", 2, "--evaluate")

    assert (code, out) == (2, "")
    assert "has no recipe.yaml that says how to evaluate; leave --evaluate out" in err
    assert not (tmp_path / "run" / "model_last_2").exists()
