"""Say in a model card how to use the model: code that loads it and runs it once."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.modelcard import TASK_MAPPING

_CLASSES = {
    "fill-mask": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "token-classification": "AutoModelForTokenClassification",
}
"""Class of transformers that loads a model, by the hub's name of its task."""

_OWN_TASKS = {"Perceptron": "tabular-regression"}
"""The hub's name of the task of each model that is not one of transformers."""

_INSTALL = {
    "mfwrap": '"mfwrap[recipes]"',
    "peft": "peft transformers torch",
    "pytorch": "torch safetensors",
    "transformers": "transformers torch",
}
"""Packages to install, by the library that loads a model."""

_PIPELINES = {
    "text-classification": '"This is a text."',
    "text-generation": '"This is", max_new_tokens=32',
    "token-classification": '"This is a text."',
}
"""Arguments of the pipelines that need a model and its tokenizer alone, by task."""

_CHAT = '[{"role": "user", "content": "What can you do?"}], max_new_tokens=64'


def task_of(model: Any) -> str | None:
    """Return the hub's name of a model's task; ``None`` if it is unknown."""
    name = type(inner_model(model)).__name__
    if name in _OWN_TASKS:
        return _OWN_TASKS[name]
    known: dict[str, Any] = TASK_MAPPING
    for task, classes in known.items():
        groups = [[one] if isinstance(one, str) else one for one in classes.values()]
        if any(name in group for group in groups):
            return task
    return None


def library_of(model: Any) -> str:
    """Return the library that loads a model, for example ``transformers`` or ``peft``."""
    if hasattr(model, "peft_config"):
        return "peft"
    if not isinstance(model, PreTrainedModel):
        return "pytorch"
    return type(model).__module__.partition(".")[0]


def inner_model(model: Any) -> Any:
    """Return the model that an adapter of PEFT wraps; any other model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def usage(
    model: Any, tokenizer: Any, repository: str | None, subfolder: str, *, is_chat: bool = False
) -> str:
    """Return the text that says how to use a saved model.

    Args:
        model: The model.
        tokenizer: Tokenizer that is saved with the model; ``None`` without one.
        repository: Repository on the hub; ``None`` for a model in a folder.
        subfolder: Folder of the model in the repository; empty for its root.
        is_chat: Whether a language model is used with messages instead of a text.
    """
    if hasattr(model, "peft_config") and not _base_name(model):
        return (
            "The model that this adapter belongs to had random weights, which were not saved. So "
            "the adapter cannot be used on its own: it shows the training. To get one that can, "
            "train an adapter of a checkpoint."
        )
    place = f'"{repository or "."}"'
    if repository and subfolder:
        place += f', subfolder="{subfolder}"'
    lines = _code(model, tokenizer, place, is_chat=is_chat)
    install = _INSTALL.get(library_of(model), "transformers torch")
    where = "" if repository else ", in the folder of the model"
    return f"After `pip install {install}`{where}:\n\n```python\n{lines}\n```"


def _code(model: Any, tokenizer: Any, place: str, *, is_chat: bool) -> str:
    if not isinstance(inner_model(model), PreTrainedModel):
        return (
            "from safetensors.torch import load_file\n\n"
            'weights = load_file("model.safetensors")  # for load_state_dict of your network'
        )
    task = task_of(model)
    is_text = tokenizer is not None and task in _PIPELINES
    package, kind = _loader(model, task)
    own = kind if package == "transformers" else ""
    names = [*([own] if own else []), *(["AutoTokenizer", "pipeline"] if is_text else [])]
    lines = [] if package == "transformers" else [f"from {package} import {kind}"]
    lines += [f"from transformers import {', '.join(names)}"] if names else []
    if not is_text:
        lines = ["import torch", *lines] if _example(model) else lines
    lines += ["", f"model = {kind}.from_pretrained({place}{_labels(model)})"]
    if is_text:
        asked = _CHAT if is_chat and task == "text-generation" else _PIPELINES[str(task)]
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained({place})",
            f'run = pipeline("{task}", model=model, tokenizer=tokenizer)',
            f"print(run({asked}))",
        ]
    else:
        lines += _example(model)
    return "\n".join(lines)


def _loader(model: Any, task: str | None) -> tuple[str, str]:
    """Return the module and the name of the class that loads a model."""
    kind = type(inner_model(model))
    is_transformers = kind.__module__.startswith("transformers.")
    known = _CLASSES.get(task or "") if is_transformers else None
    if hasattr(model, "peft_config"):
        return "peft", f"AutoPeft{known.removeprefix('Auto')}" if known else "AutoPeftModel"
    if known:
        return "transformers", known
    return ("transformers" if is_transformers else kind.__module__), kind.__name__


def _labels(model: Any) -> str:
    """Return the argument that an adapter's base model needs for its number of classes."""
    if not hasattr(model, "peft_config") or "classification" not in str(task_of(model)):
        return ""
    return f", num_labels={inner_model(model).config.num_labels}"


def _example(model: Any) -> list[str]:
    """Return lines that call a model for images or numbers; none for another model."""
    config, task = inner_model(model).config, task_of(model)
    if task == "image-classification" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        shape = f"1, {channels}, {height}, {width}"
        name = "config.id2label[logits.argmax(-1).item()]"
        return [
            f"pixels = torch.zeros({shape})  # values in the range of the training",
            "with torch.no_grad():",
            "    logits = model(pixel_values=pixels).logits",
            f"print(model.{name})",
        ]
    if task == "tabular-regression":
        return [
            f"rows = torch.zeros(1, {config.num_features})  # order and units as in the data",
            "with torch.no_grad():",
            "    print(model(rows).logits)",
        ]
    return []


def _base_name(model: Any) -> str:
    """Return the name or folder of the model that an adapter belongs to; empty if it has none."""
    name = model.active_peft_config.base_model_name_or_path or ""
    return name if "/" in name or Path(name).is_dir() else ""
