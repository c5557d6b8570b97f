"""A SIGTERM after another rank has died, as torchrun sends it, saves nothing and hangs nowhere."""

import signal

import pytest

from mfwrap.trainer.stops import program_words
from support.ranks.processes import run_ranks
from support.ranks.stops import train_until_one_dies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dead", "says"),
    [
        (0, "the process that hosts the key-value store of torch.distributed did not answer"),
        (1, "rank 1 did not answer within 10 s"),
    ],
)
def test_a_signal_after_a_death(tmp_path, dead, says):
    """The rank that remains fails with an error, and leaves the last complete checkpoint."""
    statuses = run_ranks(tmp_path, train_until_one_dies, dead)

    assert (statuses[dead], statuses[1 - dead]) == (-signal.SIGKILL, 1)
    assert (tmp_path / "error").read_text().startswith(f"training was asked to stop, but {says}")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("num_machines", "words"),
    [
        (None, "mfwrap"),
        ("1", "torchrun --standalone --nproc-per-node 2 -m mfwrap"),
        ("2", "mfwrap"),
    ],
)
def test_the_words_of_the_program(monkeypatch, num_machines, words):
    """Under torchrun on one machine, the program starts again on as many ranks."""
    variables = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}
    variables["GROUP_WORLD_SIZE"] = num_machines or ""
    for name, value in variables.items():
        if num_machines is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    assert " ".join(program_words()) == words
