"""Push the models of a finished run to the hub."""

import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from mfwrap import __version__
from mfwrap.checkpoints.resumption import newest_folder
from mfwrap.collectives import raising_together
from mfwrap.runner.folder import AVERAGED_MODEL, MODEL
from mfwrap.runner.model_card import FinishedRun


def push_models(run: FinishedRun) -> None:
    """Push the complete models of a run, each in one commit, to the repository of the recipe.

    ``model`` becomes the root of the repository, ``model_ema`` a folder of that name. Call it on
    all ranks: rank 0 pushes, and the others wait. A model that the repository already has is not
    committed again.

    Args:
        run: The run, whose Trainer has created the repository.

    Raises:
        RuntimeError: On all ranks, if a push fails. The message says how to repeat it.
    """
    trainer = run.trainer
    with raising_together():
        if trainer.is_world_process_zero():
            trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
            for name in (MODEL, AVERAGED_MODEL):
                if name == MODEL or run.average is not None:
                    _push(trainer, Path(trainer.args.output_dir), name)


_PLACES = {MODEL: (None, "End of training"), AVERAGED_MODEL: (AVERAGED_MODEL, "Averaged weights")}
"""Folder in the repository and message of the commit, by the model's folder in the run folder."""


def _push(trainer: Any, folder: Path, name: str) -> None:
    place, message = _PLACES[name]
    args, repository = trainer.args, trainer.hub_model_id
    client = HfApi(token=args.hub_token, library_name="mfwrap", library_version=__version__)
    try:
        client.upload_folder(
            repo_id=repository,
            folder_path=folder / name,
            path_in_repo=place,
            commit_message=message,
            revision=args.hub_revision,
        )
    except Exception as error:  # the client passes on the errors of several libraries
        words = ["hf", "upload", repository, str(folder / name), *([place] if place else [])]
        by_hand = shlex.join(words)
        resume = "start the run again with --resume=auto, or run: "
        msg = (
            f"cannot push {folder / name} to {repository}: {_line(error)}; the models in {folder} "
            f"are complete; to push them, {resume if newest_folder(folder) else 'run: '}{by_hand}"
        )
        raise RuntimeError(msg) from error


def _line(error: BaseException) -> str:
    """Return the text of an error, and of its cause, as one line without a full stop at its end."""
    both = [error] if error.__cause__ is None else [error, error.__cause__]
    texts = [" ".join(str(one).split()).rstrip(".") or type(one).__name__ for one in both]
    return ": ".join(texts)
