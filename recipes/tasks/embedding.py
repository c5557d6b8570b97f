"""Build the Trainer's keyword arguments for embedding texts, through sentence-transformers."""

from typing import Any

from datasets import Dataset

from mfwrap.recipes.data.columns import PAIRS, needed_columns
from mfwrap.recipes.data.source import DataSource, Rows
from mfwrap.recipes.data.streams import column_names
from mfwrap.recipes.models.sentence_encoder import make_sentence_encoder
from mfwrap.recipes.models.settings import ModelSettings


def build_embedding(model: ModelSettings, data: DataSource, rows: Rows) -> dict[str, Any]:
    """Return keyword arguments of the Trainer of sentence-transformers.

    The evaluation searches each held-out ``anchor`` in all held-out texts ``positive``.
    """
    encoder = make_sentence_encoder(model)
    if data.sequence_length is not None:
        encoder.max_seq_length = data.sequence_length
    # The losses take the columns by their order.
    columns = list(needed_columns(PAIRS, column_names(rows.train)) or ())
    return {
        "model": encoder,
        **rows.prepared(lambda table: table.select_columns(columns)),
        "evaluator": None if rows.evaluation is None else _search(rows.evaluation),
    }


def _search(rows: Dataset) -> Any:
    """Return an evaluator that searches the text ``positive`` of each ``anchor``."""
    from sentence_transformers.sentence_transformer.evaluation import (  # noqa: PLC0415  (slow; part of an extra)
        InformationRetrievalEvaluator,
    )

    numbers = {text: str(number) for number, text in enumerate(dict.fromkeys(rows["positive"]))}
    wanted: dict[str, set[str]] = {}
    for anchor, positive in zip(rows["anchor"], rows["positive"], strict=True):
        wanted.setdefault(anchor, set()).add(numbers[positive])
    return InformationRetrievalEvaluator(
        queries={str(number): anchor for number, anchor in enumerate(wanted)},
        corpus={number: text for text, number in numbers.items()},
        relevant_docs={str(number): found for number, found in enumerate(wanted.values())},
        accuracy_at_k=[1, 10],
        precision_recall_at_k=[10],
        map_at_k=[10],
        write_csv=False,
    )
