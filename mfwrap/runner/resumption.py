"""Decide whether a command starts its run, resumes it, or finds it finished, and say so."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mfwrap.checkpoints.resumption import AUTO, newest_folder
from mfwrap.checkpoints.whole import whole_file
from mfwrap.collectives import gather_objects, raising_together, this_rank
from mfwrap.records.json_lines import to_plain
from mfwrap.runner.document import RECIPE_FILE, RecipeDocument, RecipeError, read_text, shown
from mfwrap.runner.document import Path as KeyPath
from mfwrap.runner.folder import RESULT, check_others_files, checkpoints
from mfwrap.trainer.preflight import WITHOUT_EFFECT

_MOST_SAID = 8
"""Largest number of metrics in the last lines of a run: an evaluation by TRL has thirty."""


def check_resume(run_folder: str, resume: str | bool, *, overwrite: bool) -> None:  # noqa: FBT001  (a path or True, as in the Trainer)
    """Check the options ``--resume`` and ``--overwrite`` before a training is built.

    Args:
        run_folder: Run folder of the recipe.
        resume: Checkpoint to resume from, ``True`` for the newest one, or ``"auto"``; ``False``
            without the option.
        overwrite: Whether ``--overwrite`` is given.

    Raises:
        RecipeError: If both options are given, or there is no checkpoint to resume from.
    """
    if not resume:
        return
    if overwrite:
        msg = "--overwrite deletes the checkpoints that --resume needs; give only one of the two"
        raise RecipeError(msg)
    if resume == AUTO:
        return
    if resume is True:
        if not checkpoints(Path(run_folder)):
            msg = (
                f"--resume: no checkpoint in {run_folder} (`training.output_dir`); start the run "
                "without --resume, or with --resume=auto"
            )
            raise RecipeError(msg)
    elif not Path(str(resume)).is_dir() and Path(str(resume)) not in checkpoints(Path(run_folder)):
        found = [str(each) for each in checkpoints(Path(run_folder))]
        of_run = f"; those of this run: {', '.join(found)}" if found else ""
        msg = f"--resume: no such folder: {resume}; expected a checkpoint folder{of_run}"
        raise RecipeError(msg)


class FormerRun(NamedTuple):
    """What an earlier start of the same command has left in the run folder."""

    has_checkpoints: bool
    """Whether there is a checkpoint to resume from. If not, the run begins anew."""

    result: tuple[dict[str, float], str | None] | None
    """Metrics of the run, and the best checkpoint that its model is of; see `read_result`."""


def former_run(document: RecipeDocument, folder: Path) -> FormerRun:
    """Return what an earlier start of a recipe has left in its run folder.

    Call it on all ranks: rank 0 looks into the folder, and all ranks get its answer.

    Args:
        document: Recipe that is about to run.
        folder: Run folder, which may be missing.

    Raises:
        RecipeError: On all ranks, if the folder holds checkpoints or the result of another recipe.
    """
    answer: FormerRun | str | None = None
    with raising_together():
        if this_rank() == 0:
            try:
                answer = _look(document, folder)
            except (OSError, ValueError) as error:
                answer = str(error)
    found = gather_objects(answer)[0]
    if not isinstance(found, FormerRun):
        raise RecipeError(str(found))
    return found


def _look(document: RecipeDocument, folder: Path) -> FormerRun:
    check_others_files(document, folder)
    found = FormerRun(newest_folder(folder) is not None, read_result(folder))
    if not found.has_checkpoints and found.result is None:
        return found
    file = folder / RECIPE_FILE
    if not file.is_file():
        msg = (
            f"cannot resume the run in {folder}: it has no {RECIPE_FILE}, which tells its recipe; "
            "resume it with --resume, or delete it with --overwrite"
        )
        raise RecipeError(msg)
    former = RecipeDocument.parse(read_text(file), str(file))
    for path, own, other in _differences(document.data, former.data):
        if path[0] == "training" and path[1:2] and path[1] in WITHOUT_EFFECT:
            continue
        says = (
            f"the run in {folder} has {shown(other)}, got {shown(own)}; set the value of that run, "
            "resume with the new value with --resume, delete the run with --overwrite, or choose "
            "another folder with --set training.output_dir=..."
        )
        raise document.error(path, says)
    return found


def _differences(own: Any, other: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield path and both values for each difference; a missing key equals ``None``."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*own, *other]):
            yield from _differences(own.get(key), other.get(key), (*path, key))
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        for index, pair in enumerate(zip(own, other, strict=True)):
            yield from _differences(*pair, (*path, index))
    elif own != other and not (_is_nan(own) and _is_nan(other)):
        yield path, own, other


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def result_line(folder: Path, metrics: Mapping[str, float]) -> str:
    """Return the first metrics of a run that has finished, and which file has the others.

    Args:
        folder: Run folder.
        metrics: All metrics.
    """
    said = [f"{name} {value:.6g}" for name, value in metrics.items()]
    if (num_more := len(said) - _MOST_SAID) > 0:
        said[_MOST_SAID:] = [f"{num_more} more in {folder / RESULT}"]
    return ", ".join(said) or "not evaluated"


def write_result(folder: Path, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
    """Note in a run folder that the run has finished.

    Args:
        folder: Run folder.
        metrics: Its metrics.
        checkpoint: Name of the best checkpoint that the model is of; ``None`` for the last step.
    """
    content = {"metrics": dict(metrics)} | (
        {} if checkpoint is None else {"checkpoint": checkpoint}
    )
    # As in the run's records, NaN and infinity are the strings "nan", "inf" and "-inf".
    text = json.dumps(to_plain(content), indent=2, allow_nan=False)
    with whole_file(folder / RESULT) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


def read_result(folder: Path) -> tuple[dict[str, float], str | None] | None:
    """Return the metrics of a run that has finished, and the checkpoint of `write_result`.

    Returns:
        ``None`` if the run has not finished.

    Raises:
        OSError: If there is a result that cannot be read.
    """
    try:
        content = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        metrics = {str(name): float(value) for name, value in content["metrics"].items()}
        checkpoint = content.get("checkpoint")
    except (AttributeError, FileNotFoundError, KeyError, TypeError, ValueError):
        return None
    return metrics, None if checkpoint is None else str(checkpoint)
