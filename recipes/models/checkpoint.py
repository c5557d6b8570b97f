"""Check the files of a model folder without loading the model or running code of the folder."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mfwrap.names import hint

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
PROCESSOR_CONFIG = "preprocessor_config.json"
_LFS = b"version https://git-lfs.github.com/"
"""Beginning of the text that Git leaves in place of a large file without Git LFS."""

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAVED = "pytorch_model*.bin"
"""Files in which transformers saved weights before safetensors; all shards match."""

_CONVERT = (
    'python -c "import glob, sys, torch; from safetensors.torch import save_file; '
    "folder = sys.argv[1]; files = glob.glob(folder + '/pytorch_model*.bin'); "
    "save_file({name: weight.contiguous().clone() for file in files for name, weight in "
    "torch.load(file, 'cpu', weights_only=True).items()}, folder + '/model.safetensors', "
    "{'format': 'pt'})\""
)
"""Converts pickled weights in their folder, beside the tokenizer. It needs no class of a model, so
it keeps all weights. Tied weights are stored twice."""

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_OF_A_TRAINER = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.\w+")
"""Files of a Trainer beside weights, which are none."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
"""A folder with a tokenizer has one of these files."""


def model_type_of(setting: str, folder: Path) -> str:
    """Return the ``model_type`` of a model folder.

    Args:
        setting: Key that names the folder, for error messages.
        folder: Folder with ``config.json``.

    Raises:
        ValueError: If ``config.json`` is damaged or its model type is unknown.
    """
    kind = _object(setting, folder / _CONFIG).get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        says = f"a model type of transformers in {folder / _CONFIG}, got {kind!r:.80}"
        msg = f"`{setting}` must have {says}{hint(kind, CONFIG_MAPPING)}"
        raise ValueError(msg)
    return kind


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_code(setting: str, folder: Path) -> None:
    """Refuse a folder that needs Python code from the folder or the hub.

    Args:
        setting: Key that names the folder, for error messages.
        folder: Folder of a model or a tokenizer.

    Raises:
        ValueError: If the file of the model's, the tokenizer's or the image processor's settings
            has the key ``auto_map``.
    """
    for name in (_CONFIG, _TOKENIZER_CONFIG, PROCESSOR_CONFIG):
        file = folder / name
        if file.is_file() and _object(setting, file).get("auto_map"):
            msg = (
                f"`{setting}` must be a folder without remote code (auto_map in {file}); to run "
                "that code, set model.trust_remote_code=true"
            )
            raise ValueError(msg)


def check_no_adapter(setting: str, folder: Path) -> None:
    """Check that a folder does not hold an adapter without the model that it belongs to.

    Args:
        setting: Key that names the folder, for error messages.
        folder: Model folder.

    Raises:
        ValueError: If the folder holds an adapter of PEFT and no model.
    """
    file = folder / _ADAPTER
    if not file.is_file() or (folder / _CONFIG).is_file():
        return
    base = _object(setting, file).get("base_model_name_or_path")
    base_model = f"{base!r:.80}" if base else "its base model"
    msg = (
        f"`{setting}` must be a model folder, got {str(folder)!r}, which holds only an adapter; "
        f"name the folder of {base_model}, or merge the adapter into it (`merge_and_unload` of "
        "PEFT) and name the result"
    )
    raise ValueError(msg)


def check_tokenizer(setting: str, folder: Path) -> None:
    """Check that the files of a tokenizer are undamaged.

    Args:
        setting: Key that names the folder, for error messages.
        folder: Folder of a model or a tokenizer.

    Raises:
        ValueError: If a file is empty or a pointer of Git LFS, or if a JSON file is damaged.
    """
    for file in (folder / name for name in TOKENIZER_FILES):
        if not file.is_file():
            continue
        if file.suffix == ".json":
            _object(setting, file)
        elif what := _damage(file):
            msg = f"`{setting}` must have an undamaged tokenizer, got {file}: {what}"
            raise ValueError(msg)


def check_weights(setting: str, folder: Path) -> None:
    """Check that a folder has its weights as undamaged safetensors files.

    Only the headers of the files are read.

    Args:
        setting: Key that names the folder, for error messages.
        folder: Model folder.

    Raises:
        ValueError: If a file is missing, damaged or may not be read, or the weights are pickled. A
            pickle can run any code when it is loaded.
    """
    for file in _weight_files(setting, folder):
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (OSError, SafetensorError) as error:
            what = f"it is cut off or damaged ({error}); {_AGAIN}"
            wanted = "undamaged weights" if os.access(file, os.R_OK) else "weights that may be read"
            msg = f"`{setting}` must have {wanted}, got {file}: {_damage(file) or what}"
            raise ValueError(msg) from error


def file_of_weights(path: str) -> str:
    """Return the file that names the weights of a model folder, for error messages.

    Args:
        path: Folder, or name on the hub, which is returned unchanged.
    """
    found = [Path(path, name) for name in (_WEIGHTS, _INDEX) if Path(path, name).is_file()]
    return str(found[0]) if found else path


_AGAIN = "download or copy the file again"
_WHOLE = "download or copy the folder again"


def _damage(file: Path) -> str | None:
    """Return what an unreadable file is, and what to do; ``None`` if it is something else."""
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_LFS))
    except PermissionError as error:
        return f"it may not be read ({error.strerror}); change its permissions, or copy it"
    except OSError:
        return None
    if start == _LFS:
        return (
            "it is a pointer of Git LFS, not the file itself; run `git lfs install` and "
            "`git lfs pull` in the folder, or download the file again"
        )
    return None if start else f"it is empty; {_AGAIN}"


def _weight_files(setting: str, folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        parts = _object(setting, folder / _INDEX).get("weight_map")
        names = set(map(str, parts.values())) if isinstance(parts, dict) else set()
        if not names:
            index = folder / _INDEX
            msg = f"`{setting}` must have a mapping `weight_map` in {index}, got {parts!r:.80}"
            raise ValueError(msg)
        for name in sorted(names):
            if Path(name).name != name or not (folder / name).is_file():
                says = f"must have all files of {folder / _INDEX}, but lacks {name!r}"
                msg = f"`{setting}` {says}; {_WHOLE}"
                raise ValueError(msg)
        return [folder / name for name in sorted(names)]
    files = {file.name for pattern in _PICKLED for file in folder.glob(pattern)}
    pickled = sorted(name for name in files if _OF_A_TRAINER.fullmatch(name) is None)
    if pickled:
        saved = sorted(file.name for file in folder.glob(_SAVED))
        todo = f"convert them, which runs no code of them: {_CONVERT} {shlex.quote(str(folder))}"
        msg = (
            f"`{setting}` must have weights as safetensors, got pickled weights "
            f"({(saved or pickled)[0]}) in {str(folder)!r}, which can run code when they are "
            f"loaded; {todo if saved else 'save the model with `save_pretrained` of transformers'}"
        )
        raise ValueError(msg)
    says = f"must have weights ({_WEIGHTS} or {_INDEX}), got the folder {str(folder)!r}"
    msg = f"`{setting}` {says}; {_WHOLE}"
    raise ValueError(msg)


def _object(setting: str, file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"it is cut off or damaged ({error}); {_AGAIN}"
        msg = f"`{setting}` must have a readable JSON object in {file}: {_damage(file) or what}"
        raise ValueError(msg) from error
    if not isinstance(found, dict):
        msg = f"`{setting}` must have a JSON object in {file}, got {found!r:.80}"
        raise ValueError(msg)  # noqa: TRY004  (a wrong file, not a wrong argument)
    return found
