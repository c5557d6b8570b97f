"""Check the files of a model folder without loading the model or running code of the folder."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mfwrap.names import hint

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_LFS = b"version https://git-lfs.github.com/"
"""Beginning of the text that Git leaves in place of a large file without Git LFS."""

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
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
    """Refuse a folder whose model or tokenizer needs Python code from the folder or the hub.

    Args:
        setting: Key that names the folder, for error messages.
        folder: Folder of a model or a tokenizer.

    Raises:
        ValueError: If ``config.json`` or ``tokenizer_config.json`` has the key ``auto_map``.
    """
    for name in (_CONFIG, _TOKENIZER_CONFIG):
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


def check_weights(setting: str, folder: Path) -> None:
    """Check that a folder has its weights as undamaged safetensors files.

    Only the headers of the files are read.

    Args:
        setting: Key that names the folder, for error messages.
        folder: Model folder.

    Raises:
        ValueError: If a file is missing or damaged, or the weights are pickled. A pickle can run
            any code when it is loaded.
    """
    for file in _weight_files(setting, folder):
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (OSError, SafetensorError) as error:
            what = _LFS_ADVICE if _is_lfs_pointer(file) else error
            msg = f"`{setting}` must have undamaged weights, got {file}: {what}"
            raise ValueError(msg) from error


_LFS_ADVICE = (
    "it is a pointer of Git LFS, not the weights; run `git lfs install` and `git lfs pull` in the "
    "folder, or download the file again"
)


def _is_lfs_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_LFS)) == _LFS
    except OSError:
        return False


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
                msg = f"`{setting}` must have all files of {folder / _INDEX}, but lacks {name!r}"
                raise ValueError(msg)
        return [folder / name for name in sorted(names)]
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        msg = (
            f"`{setting}` must have weights as safetensors, got pickled weights ({pickled[0]}) in "
            f"{str(folder)!r}, which can run code when they are loaded; if you trust the file, "
            'convert it: python -c "from transformers import AutoModel; AutoModel.from_pretrained('
            f"{str(folder)!r}).save_pretrained('converted')\""
        )
        raise ValueError(msg)
    msg = f"`{setting}` must have weights ({_WEIGHTS} or {_INDEX}), got the folder {str(folder)!r}"
    raise ValueError(msg)


def _object(setting: str, file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"`{setting}` must have a readable JSON object in {file}: {error}"
        raise ValueError(msg) from error
    if not isinstance(found, dict):
        msg = f"`{setting}` must have a JSON object in {file}, got {found!r:.80}"
        raise ValueError(msg)  # noqa: TRY004  (a wrong file, not a wrong argument)
    return found
