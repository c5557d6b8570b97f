"""Which files a checkpoint must have, so that a training can resume from it.

Some files depend on the training: a network may have no buffers, and a subclass of the Trainer may
give its weights another name. So only the least that a checkpoint of its kind has is required.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

TRAINER_STATE = "trainer_state.json"

_OURS = "mfwrap_"
_STEP_FILES = ("mfwrap_step.json", "mfwrap_step.safetensors")
_POSITION = re.compile(r"mfwrap_position(_\d+)?\.json")
_SHARDED_RECORD = "mfwrap_sharded.json"
_OPTIMIZER = re.compile(r"optimizer.*|global_step\d+")
"""Names of an optimizer's files and folders; DeepSpeed's has the weights, too."""

_OTHER_STATE = re.compile(
    r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)([._-].*|_?\d*)"
)
_TEXTS = {"", ".csv", ".jinja", ".json", ".jsonl", ".md", ".model", ".py", ".txt", ".yaml", ".yml"}
"""Suffixes of files that hold no weights: configurations, tokenizers and cards."""


def missing_part(names: Collection[str]) -> str | None:
    """Return what a checkpoint lacks that every checkpoint of its kind has; ``None`` if nothing.

    - A checkpoint of the Trainer has its state and weights, and those that hold the state of the
      step have an optimizer, too.
    - A checkpoint of ``save_state`` has the two files of the step, and files of accelerate.
    - A checkpoint of `save_sharded` has tensors.

    Args:
        names: Names of the checkpoint's files, relative to its folder.
    """
    return next(_missing(names), None)


def _missing(names: Collection[str]) -> Iterator[str]:
    others = [name for name in names if not PurePosixPath(name).name.startswith(_OURS)]
    has_step = any(name in names for name in _STEP_FILES)
    is_trainers = TRAINER_STATE in names or any(_POSITION.fullmatch(name) for name in names)
    if not names:
        yield "files"
    if has_step:
        yield from (name for name in _STEP_FILES if name not in names)
    if is_trainers and TRAINER_STATE not in names:
        yield TRAINER_STATE
    if is_trainers and not any(_may_hold_weights(name) for name in others):
        yield "weights"
    if is_trainers and has_step and not any(_is_of_optimizer(name) for name in others):
        yield "a file of the optimizer"
    if has_step and not others:
        yield "files of accelerate"
    if _SHARDED_RECORD in names and not any(name.endswith(".safetensors") for name in others):
        yield "tensors"


def _is_of_optimizer(name: str) -> bool:
    return bool(_OPTIMIZER.fullmatch(PurePosixPath(name).parts[0]))


def _may_hold_weights(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix not in _TEXTS and not _OTHER_STATE.fullmatch(path.parts[0])
