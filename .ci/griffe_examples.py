"""What mkdocstrings is told of this project's docstrings."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Read a section ``Example:`` with a doctest as Griffe reads ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", value, flags=re.MULTILINE)
