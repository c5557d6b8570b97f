"""How many tokens and positions a network has embeddings of."""

from typing import Any

from torch import nn

_TABLES = frozenset(
    {
        "embed_positions",
        "pos_embed",
        "pos_embeddings",
        "position_embedding",
        "position_embeddings",
        "positions_embed",
        "wpe",
    }
)
"""Names that models of transformers give to their embedding of absolute positions."""


def num_embeddings(network: Any) -> int | None:
    """Return the number of tokens that a model has embeddings of; ``None`` if it does not say."""
    try:
        found = network.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):  # not every model has a table of embeddings
        return None
    return found if isinstance(found, int) else None


def num_positions(network: nn.Module) -> int | None:
    """Return the number of absolute positions of a model; ``None`` for a model without a limit."""
    tables = [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    if not tables:
        return None
    # In some models' table of positions, the first position has the row after the padding row. The
    # rows up to and including the padding row are then unused. Other models have spare rows, so the
    # configured number of positions takes precedence if it is smaller.
    sizes = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
    ]
    said: Any = getattr(getattr(network, "config", None), "max_position_embeddings", None)
    return min([*sizes, said]) if isinstance(said, int) else min(sizes)
