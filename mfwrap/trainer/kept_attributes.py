"""Save and restore what a Trainer of another library keeps in attributes during a training.

TRL's trainers count tokens, collect metrics between two logs, and train several updates on the same
completions. They save none of this, so after a resume their counts would begin at 0.
"""

import json
import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mfwrap.compatibility.other_trainers import kept_attributes, synchronized_models
from mfwrap.trainer.view import TrainerView, trains_shards

_LOG = logging.getLogger(__name__)

_MODELS = "mfwrap_reference_models.safetensors"


def save_attributes(trainer: TrainerView, folder: Path) -> None:
    """Write a rank's attributes, and the models that follow the trained one, into a checkpoint.

    Does nothing for a Trainer that has none. An attribute that holds anything else than numbers,
    texts, tensors and containers of them is left out.

    Args:
        trainer: The trainer.
        folder: Folder of the checkpoint.
    """
    args = trainer.args
    tensors: dict[str, Tensor] = {}
    attributes = {}
    for name in kept_attributes(trainer):
        of_attribute: dict[str, Tensor] = {}
        try:
            attributes[name] = _encoded(vars(trainer)[name], of_attribute, name)
        except TypeError as error:
            _LOG.debug("%s is not saved: %s", name, error)
        else:
            tensors |= of_attribute
    if attributes:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _file_name(args.process_index, args.world_size)
        record = {"num_ranks": args.world_size, "attributes": attributes}
        save_file(tensors, path, {"record": json.dumps(record)})
    models = synchronized_models(trainer.callback_handler.callbacks)
    if models and args.should_save and not trains_shards(trainer):
        weights = {
            f"{index}/{name}": value.detach().cpu().clone().contiguous()
            for index, model in enumerate(models)
            for name, value in trainer.accelerator.unwrap_model(model).state_dict().items()
        }
        save_file(weights, folder / _MODELS)


def restore_attributes(trainer: TrainerView, folder: Path) -> None:
    """Restore what `save_attributes` wrote; keep attributes that a checkpoint does not hold.

    After a change of the number of ranks, completions that the ranks had generated are not
    restored, and the counts of rank 0 are those of all ranks.

    Args:
        trainer: The trainer.
        folder: Folder of the checkpoint.
    """
    args = trainer.args
    names = [_file_name(args.process_index, args.world_size), _file_name(0, 1), _file_name(0, 2)]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is not None:
        num_ranks, attributes = _read(path, args.device)
        for name in kept_attributes(trainer, of_rank=num_ranks == args.world_size):
            if name in attributes:
                setattr(trainer, name, _restored(vars(trainer)[name], attributes[name]))
    models = synchronized_models(trainer.callback_handler.callbacks)
    if not models:
        return
    if not (folder / _MODELS).is_file() or trains_shards(trainer):
        _LOG.warning(
            "%s does not hold the reference model, which is synchronized with the trained model: "
            "it starts again from the weights that the trainer was built with",
            folder,
        )
        return
    weights = load_file(folder / _MODELS)
    for index, model in enumerate(models):
        mark = f"{index}/"
        of_model = {
            name.removeprefix(mark): value
            for name, value in weights.items()
            if name.startswith(mark)
        }
        trainer.accelerator.unwrap_model(model).load_state_dict(of_model)


def _file_name(rank: int, num_ranks: int) -> str:
    name = f"mfwrap_attributes_{rank}" if num_ranks > 1 else "mfwrap_attributes"
    return f"{name}.safetensors"


def _read(path: Path, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks and the attributes in a file.

    Args:
        path: The file.
        device: Device for the tensors that were not on the CPU.
    """
    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["record"])
    tensors = load_file(path)
    attributes = {
        name: _decoded(value, tensors, device) for name, value in record["attributes"].items()
    }
    return int(record["num_ranks"]), attributes


def _encoded(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return a value in the form of JSON, and add copies of its tensors to `tensors`.

    Args:
        value: Numbers, texts, tensors, and mappings and sequences of them.
        tensors: Tensors by name.
        path: Name of the value, with which the names of its tensors begin.

    Raises:
        TypeError: If there is anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):  # a number of NumPy
        return value.item()
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {"tensor": path, "is_on_cpu": value.device.type == "cpu"}
    if isinstance(value, Mapping):
        items = list(value.items())
        return {
            "items": [
                (_encoded(key, {}, path), _encoded(each, tensors, f"{path}/{number}"))
                for number, (key, each) in enumerate(items)
            ]
        }
    if isinstance(value, (tuple, list, deque)):
        parts = [_encoded(each, tensors, f"{path}/{i}") for i, each in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    msg = f"expected numbers, texts and tensors, got {type(value).__name__}"
    raise TypeError(msg)


def _decoded(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return a value that `_encoded` has encoded."""
    if isinstance(value, list):
        return [_decoded(each, tensors, device) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors[value["tensor"]]
        return tensor if value["is_on_cpu"] else tensor.to(device)
    if "tuple" in value:
        return tuple(_decoded(each, tensors, device) for each in value["tuple"])
    return {key: _decoded(each, tensors, device) for key, each in value["items"]}


def _restored(present: Any, saved: Any) -> Any:
    """Return a saved value, in the containers that are present.

    These keep what a plain copy lacks: the default of a dictionary, and the limit of a deque.
    """
    if isinstance(present, dict) and isinstance(saved, dict):
        for key in present.keys() - saved.keys():
            del present[key]
        for key, value in saved.items():
            has_place = key in present or isinstance(present, defaultdict)
            present[key] = _restored(present[key] if has_place else None, value)
        return present
    if isinstance(present, (list, deque)) and isinstance(saved, list):
        present.clear()
        present.extend(saved)
        return present
    return saved
