"""Extend Griffe, the docstring parser of mkdocstrings, for this project's docstrings."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Treat a docstring section ``Example:`` like Griffe's own section ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of `obj`."""
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", value, flags=re.MULTILINE)
