"""MindFormers' rules for the layer that a parameter belongs to, with transformers' names."""

import re
from collections.abc import Sequence

__all__ = ["swin_layer", "vit_layer"]


def vit_layer(name: str, num_layers: int) -> int:
    """Return the number of a parameter's layer in MindFormers' ``get_vit_layer``."""
    if name.startswith(("vit.embeddings", "beit.embeddings")):
        return 0
    number = re.search(r"\.layers?\.(\d+)\.", name)
    return num_layers + 1 if number is None else int(number[1]) + 1


def swin_layer(name: str, depths: Sequence[int]) -> int:
    """Return the number of a parameter's layer in MindFormers' ``get_swin_layer``."""
    if name.startswith("swin.embeddings"):
        return 0
    stage = re.search(r"encoder\.layers\.(\d+)\.", name)
    if stage is None:
        return sum(depths) + 1
    before, block = sum(depths[: int(stage[1])]), re.search(r"blocks\.(\d+)\.", name)
    # What a stage has besides its blocks belongs to the last of them.
    return before + (depths[int(stage[1])] if block is None else int(block[1]) + 1)
