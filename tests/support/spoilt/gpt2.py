"""A tiny GPT-2 with dropout and tied embeddings, and data that can make its loss NaN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from support.small_networks import IGNORED

__all__ = ["Rows", "SpoiltGPT2", "padded", "tiny_gpt2"]

NAN = float("nan")


class Rows(Dataset):
    """A data set of 43 rows of 4 to 11 numbers: 21 batches of two rows, and one of one row.

    Args:
        spoilt: Indices of the rows whose loss is NaN.
    """

    def __init__(self, spoilt: Sequence[int] = ()) -> None:
        self._spoilt = set(spoilt)

    def __len__(self) -> int:
        return 43

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = (index + (1 + index % 3) * torch.arange(4 + 3 * index % 8)) % 32
        return {"input_ids": row, "labels": row.clone(), "factor": self._factor(index)}

    def _factor(self, index: int) -> Tensor:
        return torch.tensor(NAN if index in self._spoilt else 1.0)


def padded(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as one batch, padded at the end; padding is ignored by the loss."""
    inputs, labels, factors = zip(*(row.values() for row in rows), strict=True)
    return {
        "input_ids": pad_sequence(inputs, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "factor": torch.stack(factors),
    }


class SpoiltGPT2(GPT2LMHeadModel):
    """A GPT-2 that multiplies its loss by all factors in the batch."""

    def forward(
        self, input_ids=None, attention_mask=None, labels=None, factor=None, **keywords: Any
    ) -> Any:
        """Return GPT-2's output with the loss times all factors."""
        output = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, **keywords
        )
        if factor is not None and output.loss is not None:
            output.loss = output.loss * factor.prod()
        return output


def tiny_gpt2(dropout: float = 0.0, seed: int = 0) -> SpoiltGPT2:
    """Return a GPT-2 of two layers and hidden size 16 with tied embeddings."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return SpoiltGPT2(config)
