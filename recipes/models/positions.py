"""How long a sequence a model can read."""

from typing import Any

from torch import nn

from mfwrap.recipes.data.source import DataError, DataSource

__all__ = ["check_length", "fitting_length"]

_DEFAULT_LENGTH = 512
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
"""What models of transformers call an embedding of absolute positions."""


def fitting_length(data: DataSource, network: nn.Module) -> int:
    """Return the longest sequence of tokens to make: what the data say, else what fits the model.

    Raises:
        DataError: If the data say more than the model has positions.
    """
    if data.sequence_length is None:
        limit = _num_positions(network)
        return _DEFAULT_LENGTH if limit is None else min(_DEFAULT_LENGTH, limit)
    check_length(data.sequence_length, network)
    return data.sequence_length


def check_length(length: int, network: nn.Module) -> None:
    """Refuse sequences that are longer than a model's table of positions.

    Raises:
        DataError: If they are. A model with rotary or relative positions has no table.
    """
    limit = _num_positions(network)
    if limit is not None and length > limit:
        said = getattr(getattr(network, "config", None), "max_position_embeddings", None)
        msg = (
            f"`sequence_length` must be <= {limit}, the positions of a model with "
            f"`max_position_embeddings` {said}, got {length}"
        )
        raise DataError(msg)


def _num_positions(network: nn.Module) -> int | None:
    tables = [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    if not tables:
        return None
    # Some count positions from behind the index of padding, and some have spare rows.
    sizes = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
    ]
    said: Any = getattr(getattr(network, "config", None), "max_position_embeddings", None)
    return min([*sizes, said]) if isinstance(said, int) else min(sizes)
