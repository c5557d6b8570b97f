"""The data of an imported MindFormers file, which the user has to replace."""

from dataclasses import dataclass
from typing import Literal, final

from mfwrap.recipes.data.source import DataSource, Rows


@final
@dataclass(frozen=True, kw_only=True)
class MindFormersSource(DataSource):
    """Data that only MindFormers reads. A recipe with them is valid, but cannot be trained."""

    type: Literal["mindformers"] = "mindformers"

    loader: str
    """MindFormers' loader, for example ``MindDataset`` for MindRecord files."""

    path: str | None = None
    """File or folder that the loader reads."""

    @property
    def why_unread(self) -> str:
        return f"mfwrap does not read the data of MindFormers' {self.loader}"

    def read(self) -> Rows:
        of = "" if self.path is None else f" ({self.path})"
        msg = (
            f"`type` must be a source of mfwrap, such as 'json_lines', because mfwrap does not "
            f"read the data of MindFormers' {self.loader}{of}; replace the section `data`"
        )
        raise ValueError(msg)
