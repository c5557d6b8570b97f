"""Say from which checkpoint a training that has failed can go on."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfwrap.callbacks.culprit.good_checkpoints import episodes_in, good_checkpoints
from mfwrap.records.episodes import Episode
from mfwrap.runner.folder import checkpoints


@contextlib.contextmanager
def telling_the_way_on(trainer: Any, folder: Path) -> Iterator[None]:
    """Add to the error of a training that has begun from which checkpoint it can go on."""
    try:
        yield
    except Exception as error:
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC  # says so itself
        if trainer.run_facts.has_failed and not is_full and (saved := checkpoints(folder)):
            # A damaged file must not hide the error.
            with contextlib.suppress(OSError, ValueError):
                error.add_note(_way_on(folder, saved, trainer.state.global_step))
        raise


def _way_on(folder: Path, saved: list[Path], last_step: int) -> str:
    """Return what to do after a failure: a run that goes on with ruined weights fails again.

    Args:
        folder: Run folder.
        saved: Its checkpoints.
        last_step: Last step of the run.
    """
    spoilt = next((one for one in episodes_in(folder) if _has_spoilt(one, last_step)), None)
    if spoilt is None or (good := good_checkpoints(spoilt, saved)) == saved:
        return f"once it is mended, --resume=auto continues from {saved[-1].name}"
    if good:
        when = f"before step {spoilt.step}, where it went wrong"
        return f"once it is mended, --resume={good[-1]} continues from {when}"
    return (
        f"no checkpoint has good weights, as it went wrong at step {spoilt.step}: once it is "
        "mended, for example by a lower learning rate, start anew with --overwrite"
    )


def _has_spoilt(episode: Episode, last_step: int) -> bool:
    """Tell whether the loss has not come back from an episode, or updates were skipped to the end.

    The last step may not have been judged.
    """
    goes_on = episode.num_skipped > 0 and episode.last_step >= last_step - 1
    return episode.has_diverged or goes_on
