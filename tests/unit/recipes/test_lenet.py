"""The recipe of MindSpore's LeNet script learns to read digits with `Model`."""

import re
import sys

import pytest
import torch

from mfwrap.recipes import lenet


def run(monkeypatch, folder, *arguments: str) -> None:
    """Run the recipe as its command line does."""
    monkeypatch.setattr(sys, "argv", ["lenet", f"--output_dir={folder}", *arguments])
    lenet.main()


def test_the_recipe_prints_and_saves(monkeypatch, tmp_path, capsys):
    """Each epoch prints loss and time; the end prints the accuracy and saves a checkpoint."""
    run(monkeypatch, tmp_path, "--epoch_size=2", "--save_checkpoint_steps=1000")

    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"epoch: 1 step: 89, loss is \d\.\d+", lines[0])
    assert re.fullmatch(r"Train epoch time: [\d.]+ ms, per step time: [\d.]+ ms", lines[1])
    assert float(re.fullmatch(r"accuracy on held-out digits: (0\.\d+)", lines[4])[1]) > 0.3
    state = torch.load(lines[5].removeprefix("checkpoint: "), weights_only=True)
    lenet.LeNet().load_state_dict(state["network"])
    assert (state["epoch_num"], state["step_num"]) == (2, 178)


@pytest.mark.slow
def test_the_recipe_reads_digits(monkeypatch, tmp_path, capsys):
    """The trained network reads more than 97% of the held-out digits correctly."""
    run(monkeypatch, tmp_path)

    accuracy = re.search(r"accuracy on held-out digits: ([\d.]+)", capsys.readouterr().out)
    assert float(accuracy[1]) > 0.97
