"""Check the paths of a recipe: folders, folders of installed packages, and names on the hub."""

import difflib
import importlib.util
import re
from collections.abc import Callable, Collection
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # (no __all__)

_PACKAGE = "package:"
_MOST_SHOWN = 6
"""Number of folders that are named."""

_MOST_SECONDS = 5.0
"""Time in which the hub must answer whether it has a model."""

_MODEL_OF_A_RUN = re.compile(r"runs/([\w-]+)/model")
"""Where the run of a recipe writes its model by default."""


def resolve_package(setting: str, name: str) -> str:
    """Return the folder to which ``package:name/folder`` refers; return any other name unchanged.

    The package is not imported.

    Args:
        setting: Key that holds the name, for error messages.
        name: The name.

    Raises:
        ValueError: If the package is not installed or does not have the folder, or if the folder is
            outside the package, for example because of ``..`` or a symbolic link.
    """
    if not name.startswith(_PACKAGE):
        return name
    package, _, inner = name.removeprefix(_PACKAGE).partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    for place in (found.submodule_search_locations or []) if found is not None else []:
        folder = Path(place, inner)
        if not folder.is_dir():
            continue
        if not folder.resolve().is_relative_to(Path(place).resolve()):
            msg = f"`{setting}` must be a folder inside the package, got {name!r}, which leaves it"
            raise ValueError(msg)
        return str(folder)
    msg = f"`{setting}` must be a folder of an installed package; {name!r} does not exist"
    raise ValueError(msg)


def check_place(setting: str, name: str, files: Collection[str], content: str) -> None:
    """Check that a name is a folder with the right content, or has the form of a name on the hub.

    Args:
        setting: Key that holds the name, for error messages.
        name: The name.
        files: Names of files. The folder must have at least one of them.
        content: What the folder must hold, for error messages.

    Raises:
        ValueError: If the name is a file, a folder without the content, or neither a folder nor the
            form of a name on the hub; also if it is similar to that of a folder here, and the hub
            does not say within five seconds that it has such a model.
    """
    if is_folder(name):
        if not any(Path(name, file).is_file() for file in files):
            listed = " or ".join(files)
            says = f"`{setting}` must be {content}, got the folder {name!r} without {listed}"
            msg = f"{says}{_inside(Path(name), files)}"
            raise ValueError(msg)
        return
    similar = similar_folder(name, files)
    is_path = Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    is_path |= is_file(name)
    why_not = None if is_path or similar is None else why_not_on_hub(name)
    if is_path or why_not is not None:
        run = _MODEL_OF_A_RUN.fullmatch(name)
        made = "" if run is None else f"; the run of the recipe `{run[1]}` writes it"
        made = made or ("; this is a file, name its folder" if is_file(name) else "")
        if name.startswith("~"):
            made = f"; `~` is not replaced here, write {str(Path(name).expanduser())!r}"
        made = made or _meant(similar)
        got = f"{name!r}: no folder here, and {why_not}" if why_not else f"{name!r}"
        msg = f"`{setting}` must be an existing folder, or a name on the hub, got {got}{made}"
        raise ValueError(msg)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        msg = f"`{setting}` must be an existing folder, or a name on the hub, got {name!r:.80}"
        raise ValueError(msg) from error


def why_not_on_hub(name: str) -> str | None:
    """Ask the hub, once and for five seconds, whether it has a model or a tokenizer.

    To load from the hub what it does not have takes half a minute of attempts.

    Args:
        name: Name on the hub.

    Returns:
        Why the name is none that can be loaded, in a clause; ``None`` if the hub or the cache has
        it.
    """
    cached = repo_folder_name(repo_id=name, repo_type="model")
    if Path(constants.HF_HUB_CACHE, cached, "snapshots").is_dir():  # of any revision
        return None
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_MOST_SECONDS)
    except (EntryNotFoundError, GatedRepoError, RevisionNotFoundError):
        return None  # the repository is there, and what else may be wrong is told when it is loaded
    except (HFValidationError, RepositoryNotFoundError):
        return "the hub does not have it (a private one needs `hf auth login`)"
    # The client passes on the errors of the libraries that it is built on.
    except Exception as error:  # noqa: BLE001  (see above)
        return f"the hub does not answer ({type(error).__name__}; check the connection)"
    return None


def _inside(folder: Path, files: Collection[str]) -> str:
    """Return which folder inside of a folder has the right content, such as its last checkpoint.

    If the folder is empty, return that.
    """
    if not any(folder.iterdir()):
        return "; the folder is empty"
    # Not `rglob`: the folder may be a whole disk. A cache of the hub has the folder `snapshots`.
    places = [f"{inner}/{file}" for inner in ("*", "snapshots/*") for file in files]
    found = sorted({each.parent for at in places for each in folder.glob(at)}, key=_in_order)
    are_of_one_run = all(re.fullmatch(r"(checkpoint|step)?[-_]?\d+", one.name) for one in found)
    if len(found) == 1 or (found and are_of_one_run):
        return f"; did you mean {str(found[-1])!r}?"
    if found:
        shown = ", ".join(repr(str(one)) for one in found[:_MOST_SHOWN])
        more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        return f"; did you mean one of {shown}{more}?"
    is_other = any(folder.glob("*.gguf"))
    if is_other:
        return "; weights in GGUF are for inference: name the model that they were made of"
    return "; if it should have one, download or copy the folder again"


def _in_order(folder: Path) -> list[tuple[int, str]]:
    """Return a key that sorts ``checkpoint-10`` behind ``checkpoint-9``."""
    parts = re.split(r"(\d+)", str(folder))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def not_a_folder(name: str) -> str:
    """Say that a name is no folder here, and which folder has a similar name."""
    return _absent(name, "folder", Path.is_dir)


def similar_folder(name: str, files: Collection[str]) -> str | None:
    """Return a folder whose name is similar to one that does not exist; ``None`` without one.

    Args:
        name: The name.
        files: Names of files. The folder must have at least one of them.
    """

    def is_meant(folder: Path) -> bool:
        return any((folder / file).is_file() for file in files)

    return None if is_folder(name) else _similar(name, is_meant)


def not_a_file(name: str) -> str:
    """Say that a name is no file here, and which file has a similar name."""
    return _absent(name, "file", Path.is_file)


def _absent(name: str, kind: str, is_kind: Callable[[Path], bool]) -> str:
    return f"there is no {kind} {name!r} here{_meant(_similar(name, is_kind))}"


def _meant(similar: str | None) -> str:
    return "" if similar is None else f"; did you mean {similar!r}?"


def _similar(name: str, is_kind: Callable[[Path], bool]) -> str | None:
    path = Path(name)
    parent: str | None = str(path.parent)
    if not is_folder(path.parent):
        parent = _similar(str(path.parent), Path.is_dir)
    if parent is None:
        return None
    found = {each.name: str(each) for each in Path(parent).glob("*") if is_kind(each)}
    # Names alone: paths with the same parent are always similar.
    return next((found[one] for one in difflib.get_close_matches(path.name, found, n=1)), None)


def is_folder(name: str | Path) -> bool:
    """Return whether a name is the path of an existing folder."""
    try:
        return Path(name).is_dir()
    except OSError:  # for example a name that is longer than the file system allows
        return False


def is_file(name: str | Path) -> bool:
    """Return whether a name is the path of an existing file."""
    try:
        return Path(name).is_file()
    except OSError:  # see `is_folder`
        return False
