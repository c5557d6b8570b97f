"""Build the Trainer's keyword arguments for language models that TRL tunes."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import AutoModelForCausalLM

from mfwrap import __version__
from mfwrap.recipes.data.forms import Form, Row, form_of
from mfwrap.recipes.data.source import DataSource, Rows, kept_columns
from mfwrap.recipes.data.streams import column_names
from mfwrap.recipes.models.settings import ModelSettings, make_text_model


def build_tuning(
    forms: Sequence[Form], model: ModelSettings, data: DataSource, rows: Rows
) -> dict[str, Any]:
    """Return keyword arguments of TRL's ``SFTTrainer`` or ``DPOTrainer``, which tokenize the rows.

    Args:
        forms: Forms of rows that the task takes.
        model: Section ``model``.
        data: Section ``data``.
        rows: Rows of the data.
    """
    tokenizer = model.make_tokenizer()
    form = form_of(forms, column_names(rows.train), data.columns)
    is_chat = tokenizer.chat_template is not None
    return {
        "model": make_text_model(model, AutoModelForCausalLM, tokenizer),
        **rows.prepared(lambda table: _prepared(form, table, is_chat=is_chat)),
        "processing_class": tokenizer,
    }


def _prepared(form: Form, table: Any, *, is_chat: bool) -> Any:
    """Return rows with the columns that TRL knows."""
    columns = form.columns_in(column_names(table))
    table = table.select_columns(kept_columns(table, columns))
    convert = form.convert if is_chat else form.convert_plain or form.convert
    first = next(iter(table), None)
    if convert is None or first is None or (converted := convert(first)) == first:
        return table
    return table.map(
        _converted,
        # The library keeps converted rows. They must not be used by another version of mfwrap.
        fn_kwargs={"convert": convert, "version": __version__},
        remove_columns=[name for name in columns if name not in {*converted, "tools"}],
    )


def _converted(row: Row, convert: Callable[[Row], Row], version: str) -> Row:
    del version
    return convert(row)
