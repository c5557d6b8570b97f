"""Data from folders of images."""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from datasets import ClassLabel, Dataset, Image, load_dataset
from datasets.exceptions import DatasetsError

from mfwrap.recipes.data.files import reading_locally
from mfwrap.recipes.data.source import DataSource, Rows

IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""Endings of image files, in lower case."""

_EVALUATION = ("validation", "test")
"""Names that `datasets` gives to splits for evaluation, in order of precedence."""


@final
@dataclass(frozen=True, kw_only=True)
class ImageFolderSource(DataSource):
    """A folder of images, read as `datasets` reads an ``imagefolder``.

    The column ``image`` has the images, and ``label`` the name of the folder that an image is in,
    as in ``photos/cat/1.jpg``. With a file ``metadata.csv`` or ``metadata.jsonl`` in the folder,
    the columns are those of the file. Folders ``train`` and ``validation`` or ``test`` are splits.
    """

    type: Literal["image_folder"] = "image_folder"

    path: str
    """Folder with the images for training."""

    eval_path: str | None = None
    """Folder with held-out images. Without it, the split ``validation`` or ``test`` of `path` is
    used, or else `eval_fraction` of the images is held out."""

    def __post_init__(self) -> None:
        """Check that the folders have images."""
        super().__post_init__()
        for name in ("path", "eval_path"):
            folder = getattr(self, name)
            if folder is not None and not has_images(folder):
                msg = f"`{name}` must be a folder with images (.jpg, .png, ...), got {folder!r}"
                raise ValueError(msg)

    def read(self) -> Rows:
        try:
            with reading_locally():
                if self.eval_path is None:
                    found = load_dataset("imagefolder", data_dir=glob.escape(self.path))
                else:
                    # One call for both folders, so that a class has the same number in both.
                    folders = {"train": self.path, "test": self.eval_path}
                    patterns = {
                        name: f"{glob.escape(folder)}/**" for name, folder in folders.items()
                    }
                    found = load_dataset("imagefolder", data_files=patterns)
        except (DatasetsError, ValueError) as error:
            msg = f"`path` must be a folder of images; cannot read {self.path!r}: {error}"
            raise ValueError(msg) from error
        if "train" not in found:
            msg = f"`path` must have images for training, got only the splits {list(found)}"
            raise ValueError(msg)
        held_out = next((found[name] for name in _EVALUATION if name in found), None)
        if held_out is not None:
            self._check_classes(found["train"], held_out)
        return Rows(found["train"], held_out)

    def _check_classes(self, train: Dataset, held_out: Dataset) -> None:
        """Refuse a folder of held-out images whose name is not the class of a training image."""
        if not isinstance(label := train.features.get("label"), ClassLabel):
            return
        new = set(held_out.unique("label")) - set(train.unique("label"))
        if new:
            known = [label.names[number] for number in sorted(train.unique("label"))]
            index = held_out["label"][:].index(min(new))
            wanted = f"only classes of the training images, {known!r:.200}, in held-out images"
            got = f"{label.names[min(new)]!r} at {_path(held_out, index)}"
            setting = "path" if self.eval_path is None else "eval_path"
            msg = f"`{setting}` must have {wanted}, got {got}"
            raise ValueError(msg)

    def place(self, row: int, *, held_out: bool) -> str | None:
        rows = self.read().evaluation if held_out else self.read().train
        if rows is None or "image" not in rows.column_names:
            return None
        return _path(rows, row - 1)


def has_images(folder: str) -> bool:
    """Return whether a folder, or a folder inside it, has image files."""
    files = Path(folder).rglob("*")
    return any(file.suffix.lower() in IMAGE_ENDINGS and file.is_file() for file in files)


def _path(rows: Dataset, index: int) -> str | None:
    stored = rows.cast_column("image", Image(decode=False))[index]["image"]
    return None if stored is None else str(stored["path"])
