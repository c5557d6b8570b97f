"""Convert the data of a MindFormers file, or name them as data that the user has to replace."""

from collections.abc import Mapping, Sequence
from typing import Any

from mfwrap.recipes.data.instructions import SEPARATING
from mfwrap.recipes.data.library import DatasetsSource
from mfwrap.recipes.tasks.table import TASKS
from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.source import SourceFile

_LOADERS = frozenset({"CommonDataLoader", "HFDataLoader"})
"""Loaders that read data with the library `datasets`."""

_OF_DATASETS = ("path", "name", "revision", "data_files", "data_dir", "split")
"""Arguments of ``load_dataset`` that are keys of a recipe's source of the same name."""

_WITHOUT_EFFECT = frozenset({
    "cache_dir", "column_names", "compressed_eod_mask_length", "create_attention_mask",
    "create_compressed_eod_mask", "download_mode", "keep_in_memory", "load_func", "num_proc",
    "num_parallel_workers", "python_multiprocessing", "token", "trust_remote_code",
    "use_broadcast_data", "verification_mode",
})  # fmt: skip
_HANDLERS = ["AlpacaInstructDataHandler", "PackingHandler"]
_ELSEWHERE = frozenset({"adaptor_config", "handler", "packing", "shuffle", "streaming", "type"})


def take_data(
    source: SourceFile,
    place: tuple[str, ...],
    config: Mapping[str, Any],
    task: str,
    *,
    columns: Sequence[str] | None,
    is_former: bool,
    evaluates: bool = False,
) -> dict[str, Any]:
    """Return the section ``data``.

    Data that `datasets` reads, and the Alpaca handler formats, are converted. Others stay as a name
    that the user has to replace, and a note says why.

    Source: MindFormers 1.7 to 2.0, ``HFDataLoader`` and its handlers.

    Args:
        source: File, for its notes. The section of the loader is read, but not taken.
        place: Path of the section of the loader.
        config: Section ``model.config`` of the recipe; empty if the model is loaded.
        task: Task of the recipe.
        columns: Columns that the network gets; ``None`` for all that the loader has.
        is_former: Whether the network is one of MindFormers before its core of 2025, which takes
            rows of another form.
        evaluates: Whether the training evaluates.
    """
    section: Any = source.document.data
    for key in place:
        inner = section.get(key)
        section = inner if isinstance(inner, dict) else {}
    loader = section.get("type") or "MindDataset"
    if loader not in _LOADERS:
        return _named(source, section, loader, f"mfwrap does not read {loader}")
    why = _why_not(section, is_former=is_former)
    if "template" not in TASKS[task].options:
        why = f"mfwrap does not convert data of the task {task}"
    data = {} if why else _converted(section, columns)
    why = why or _refusal(data, config)
    if why:
        return _named(source, section, loader, why)
    if not evaluates:
        data["eval_fraction"] = 0.0
    tokenizer = "set model.tokenizer to the handler's" if config else "with the model's tokenizer"
    source.notes.append(f"data: {loader} becomes load_dataset; {tokenizer}")
    if evaluates:
        source.notes.append("data: a tenth of the rows is held out, instead of eval_dataset")
    if "targets" in data:
        says = "as MindFormers' PackingHandler shifts the labels a second time; next_token does not"
        source.notes.append(f"data.targets: {says}")
    return data


def _refusal(data: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return why the converted section would be an error in the recipe; ``None`` if it is none."""
    kind = config.get("model_type")
    if data.get("separate_texts") and kind not in {None, *SEPARATING}:
        return f"mfwrap cannot keep the texts of a row apart in a model of type {shown(kind)}"
    try:
        DatasetsSource(**data)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _named(source: SourceFile, section: Mapping[str, Any], loader: str, why: str) -> dict[str, Any]:
    """Return a section that names MindFormers' data, and add a note about it."""
    paths = [section.get(key) for key in ("dataset_files", "dataset_dir", "data_files", "path")]
    path = next((one for one in paths if isinstance(one, str) and one), None)
    data = {"type": "mindformers", "loader": loader} | ({} if path is None else {"path": path})
    source.notes.append(f"data: {why}; replace the section data, and set model.tokenizer")
    return data


def _why_not(section: Mapping[str, Any], *, is_former: bool) -> str | None:
    """Return why a recipe cannot have the data; ``None`` if it can."""
    unknown = section.keys() - {*_OF_DATASETS, *_WITHOUT_EFFECT, *_ELSEWHERE}
    handlers = _handlers(section)
    kinds = [one.get("type") for one in handlers]
    chosen = kinds[1:] if kinds[:1] == ["take"] else kinds
    lengths = [one.get("seq_length") for one in handlers if one.get("type") != "take"]
    packing = handlers[-1].get("pack_strategy", section.get("packing")) if handlers else None
    reasons = {
        "the rows of networks without use_legacy: False differ between releases": is_former,
        "mfwrap converts only load_dataset without streaming": (
            section.get("load_func", "load_dataset") != "load_dataset" or section.get("streaming")
        ),
        f"mfwrap does not know {sorted(unknown)} of the loader": unknown,
        f"mfwrap converts only the handlers {_HANDLERS} and take, not {shown(kinds)}": (
            not chosen or chosen != _HANDLERS[: len(chosen)]
        ),
        f"the handlers must have one seq_length, not {lengths}": (
            len(set(lengths)) > 1 or not all(isinstance(one, int) for one in lengths)
        ),
        f"mfwrap converts only pack_strategy 'pack', not {shown(packing)}": (
            len(chosen) > 1 and packing not in (None, "pack")
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _handlers(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    handlers = section.get("handler") or []
    handlers = [handlers] if isinstance(handlers, dict) else handlers
    return [one if isinstance(one, dict) else {"type": one} for one in handlers]


def _converted(section: Mapping[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    handlers = _handlers(section)
    data: dict[str, Any] = {"type": "datasets"}
    data |= {key: section[key] for key in _OF_DATASETS if section.get(key) is not None}
    if handlers[0]["type"] == "take":
        data["max_train_samples"] = handlers[0].get("n")
    data |= {"template": "alpaca", "sequence_length": handlers[-1]["seq_length"]}
    if handlers[-1]["type"] == "PackingHandler":
        masks = {"attention_mask", "actual_seq_len"}
        is_separate = columns is None or bool(masks & {*columns})
        data |= {"packing": True, "separate_texts": is_separate, "targets": "mindformers"}
    return data
