"""After an error of the Trainer about its data, say what the cause is likely to be."""

import re
from collections.abc import Mapping
from typing import Any

from mfwrap.tensors.wrappers import unwrapped_network

_WITHOUT_LOSS = "did not return a loss"
_UNEQUAL = re.compile(r"expected sequence of length \d+ at dim \d+|Unable to create tensor")
"""Texts of the errors of collators that do not pad."""

_PADDING = (
    "rows of a batch have different lengths, and the collator does not pad them all; pass "
    "`processing_class=tokenizer` or `data_collator=DataCollatorWithPadding(tokenizer)`, and if "
    "each token has a label, DataCollatorForTokenClassification or DataCollatorForSeq2Seq, which "
    "pad the labels, too"
)


def explain_missing_loss(
    error: BaseException, model: Any, rows: Any, inputs: Mapping[str, Any]
) -> None:
    """Add a note to the Trainer's error for a model that has returned no loss.

    Args:
        error: Any error.
        model: Model that was trained, also wrapped.
        rows: Training data.
        inputs: Batch of the model.
    """
    if _WITHOUT_LOSS not in str(error) or "labels" in inputs:
        return
    inner: Any = unwrapped_network(model)
    kind = type(inner).__name__
    first = _first(rows)
    given = next((name for name in ("labels", "label") if name in first), None)
    if given is not None and isinstance(first[given], str):
        note = (
            f"the batch has no labels, because the column `{given}` holds texts, such as "
            f"{first[given]!r:.40}; replace them by the numbers of the classes, from 0"
        )
    elif given is not None:
        note = (
            f"{kind} takes no labels, so the column `{given}` was left out; use a class with a "
            "head and a loss, such as AutoModelForSequenceClassification"
        )
    else:
        note = (
            f"the data have no column `labels`, only {sorted(map(str, first))}; add it, or for a "
            "language model pass data_collator=DataCollatorForLanguageModeling(tokenizer, "
            "mlm=False), which makes it from the tokens"
        )
    error.add_note(note)


def explain_rows(error: BaseException) -> None:
    """Add a note to the error of a collator that cannot make one tensor of several rows."""
    if isinstance(error, ValueError) and _UNEQUAL.search(str(error)) is not None:
        error.add_note(_PADDING)


def _first(rows: Any) -> Mapping[str, Any]:
    """Return the first row; empty if it cannot be had without side effects."""
    try:
        found = rows[0]
    except Exception:  # noqa: BLE001  (a data set of the user's own, or a stream)
        return {}
    return found if isinstance(found, Mapping) else {}
