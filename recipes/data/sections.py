"""What the sections of a recipe have in common."""

from typing import Any, ClassVar

__all__ = ["Section"]


class Section:
    """Base of the frozen dataclasses that a section of a recipe becomes.

    A section refuses keys that it does not know and values of another type; an int is a float.
    Bad values and bad pairs are refused in ``__post_init__`` by a ``ValueError`` whose message
    begins with the key in backticks.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}
