"""Which checkpoints are kept."""

import pytest

from mfwrap.callbacks.checkpoint_health import CheckpointHealth, record_health
from mfwrap.callbacks.checkpoint_monitor import rotate_checkpoints


@pytest.mark.parametrize(
    ("num_kept", "best", "healthy", "left"),
    [
        (1, None, [], [10]),
        (3, None, [], [3, 4, 10]),
        (9, None, [], [1, 2, 3, 4, 10]),
        (1, 2, [], [2, 10]),
        (1, None, [1, 3], [3, 10]),
        (2, 1, [1, 3, 10], [1, 4, 10]),
        (1, 9, [9], [10]),
    ],
)
def test_what_is_left(num_kept, best, healthy, left, tmp_path):
    """The last ones by number, the best one, the newest healthy one, and what is none."""
    for step in (1, 2, 3, 4, 10):
        (tmp_path / f"checkpoint-{step}" / "deep").mkdir(parents=True)
        name = f"checkpoint-{step}"
        record_health(
            tmp_path, CheckpointHealth(checkpoint=name, step=step, healthy=step in healthy)
        )
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint.partial" / "removed" / "checkpoint-0").mkdir(parents=True)
    rotate_checkpoints(
        tmp_path, num_kept, None if best is None else str(tmp_path / f"checkpoint-{best}")
    )

    kept = {f"checkpoint-{step}" for step in left}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == kept | {"checkpoint-x"}
