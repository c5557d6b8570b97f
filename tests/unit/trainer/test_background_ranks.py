"""Two ranks learn at the same step that a checkpoint is written, or that it could not be."""

import pytest

from support.ranks.background import fail_to_save, save_later
from support.ranks.trainer import save_on_own_disk


def test_the_same_checkpoints(two_ranks, tmp_path):
    """The files are those of a save at once; `on_save` comes on both ranks before the same step."""
    first, second = two_ranks.run(save_later, str(tmp_path))

    assert first == second
    # The states of the callbacks in them are the same, too.
    assert first["at_once"] == first["later"]
    assert {name.partition("/")[0] for name in first["later"]} == {"checkpoint-6", "checkpoint-8"}
    assert first["at_once told"] == [(step, step) for step in (2, 4, 6, 8)]
    steps, told = zip(*first["later told"], strict=True)
    assert steps == (2, 4, 6, 8)
    assert told[0] in {3, 4}
    assert told[-1] == 8


def test_a_full_disk(two_ranks, tmp_path):
    """Both ranks raise the error of the rank that writes, and both can train again."""
    (error, left, trains), other = two_ranks.run(fail_to_save, str(tmp_path))

    assert error.endswith("No space left on device: " + repr(
        f"{tmp_path}/run/_checkpoint-2.partial/checkpoint-2/optimizer.pt"))  # fmt: skip
    assert other == (error, left, trains)
    assert left == []
    assert trains


@pytest.mark.parametrize("each_node", [False, True])
def test_nodes_with_disks_of_their_own(two_ranks, tmp_path, each_node):
    """Each node has its files in place, and with ``save_on_each_node`` its own model."""
    arguments = (str(tmp_path), each_node, True)
    first, second = two_ranks.run(save_on_own_disk, *arguments)

    assert "left_over" not in [*first, *second]
    assert "model.safetensors" in first
    assert ("model.safetensors" in second) == each_node
    assert "rng_state_1.pth" in second
