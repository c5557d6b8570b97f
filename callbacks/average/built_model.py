"""Write a model with an average that is built after the training, for ``from_pretrained``."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mfwrap.callbacks.average.snapshots import Built, Stored, weighted_sums, weights_in
from mfwrap.checkpoints.network_weights import EXPORT
from mfwrap.checkpoints.required_files import TRAINER_STATE
from mfwrap.checkpoints.run_folders import checkpoints_of_run, step_of_checkpoint
from mfwrap.checkpoints.step_files import load_tensors
from mfwrap.checkpoints.verification import verify
from mfwrap.checkpoints.whole import whole_folder
from mfwrap.records.own_names import AVERAGE_SNAPSHOTS

_ADAPTER = "adapter_model.safetensors"
_LEFT_OUT = r"(\.modules_to_save)?\.default\b"
"""What PEFT leaves out of the names of weights in the file of an adapter."""

_TEXTS = {".jinja", ".json", ".model", ".py", ".txt"}
"""Suffixes of configurations, of tokenizers and of code."""


def write_model(built: Built, run: Path, output: Path) -> None:
    """Write a model with averaged weights to a folder, in the dtypes of the run's model.

    What is not averaged, such as frozen weights, integer buffers, configuration and tokenizer, is
    that of the newest checkpoint of a plain average, or of the checkpoint nearest to the newest
    snapshot. The process needs memory for one model, and for a few tensors.

    Args:
        built: How the average is built.
        run: Run folder.
        output: Folder to write or replace.

    Raises:
        ValueError: If the run has no model with these weights, or its checkpoint is damaged.
    """
    newest = built.parts[-1][0]
    model, folder = _model_of(newest, run)
    is_adapter = (folder / _ADAPTER).is_file()
    dropped = _LEFT_OUT if is_adapter else ""
    names = {re.sub(dropped, "", name): name for name in newest.tensors}
    if missing := next((name for name in names if name not in model.tensors), None):
        msg = (
            f"{folder} must have the averaged weights under their names in the network, got no "
            f"{missing!r}; train with EMACallback(export=True), which stores such a model"
        )
        raise ValueError(msg)
    weights: dict[str, Tensor] = {}
    like: dict[str, Tensor] = {}
    for name, (place, stored) in model.tensors.items():
        dtype = stored.properties.dtype
        if name in names and dtype.is_floating_point:
            like[names[name]] = torch.zeros(()).expand(stored.size)
        else:
            weights[name] = torch.zeros(stored.size, dtype=dtype)
            load_tensors(place, {f"{model.prefix}{name}": weights[name]})
    built.check_fit(like)
    stored_as = {own: name for name, own in names.items()}
    for own, value in weighted_sums(built, like):
        name = stored_as[own]
        weights[name] = value.to(model.tensors[name][1].properties.dtype)
    with whole_folder(output) as written:
        for path in folder.iterdir():
            is_state = path.name.startswith("mfwrap_") or path.name == TRAINER_STATE
            if path.suffix in _TEXTS and not is_state and not path.name.endswith(".index.json"):
                shutil.copyfile(path, written / path.name)
        file = written / (_ADAPTER if is_adapter else "model.safetensors")
        save_file(weights, file, metadata={"format": "pt"})


def _model_of(newest: Stored, run: Path) -> tuple[Stored, Path]:
    """Return the weights of the model that is nearest to a snapshot or checkpoint."""
    for folder in _candidates(newest, run):
        for each in (folder / EXPORT, folder) if newest.sigma_rel else (folder,):
            if each.is_dir() and (found := weights_in(each)).tensors:
                try:
                    verify(folder)
                except ValueError as error:
                    msg = f"{folder} is damaged: {error}"
                    raise ValueError(msg) from error
                return found, each
    msg = f"{run} has no checkpoint with a model in safetensors files, for its configuration"
    raise ValueError(msg)


def _candidates(newest: Stored, run: Path) -> Iterator[Path]:
    yield newest.folder
    if newest.folder.parent == run / AVERAGE_SNAPSHOTS and (found := checkpoints_of_run(run)):
        step = step_of_checkpoint(newest.folder)
        yield min(found, key=lambda folder: abs(step_of_checkpoint(folder) - step))
    yield from (run / "model_ema", run / "model")
