"""Name the key of a recipe that an error of another library is about."""

import re
from typing import Any, NamedTuple, final

from torch import nn

from mfwrap.runner.document import Path, RecipeDocument, RecipeError, one_line


@final
class _Cause(NamedTuple):
    text: str
    """Regular expression in the text of the error."""

    path: Path
    """Key of the recipe that the error is about."""

    says: str
    """What is wrong, and what to do."""


_CAUSES = (
    _Cause(
        r"`eos_token` .* is not found in the vocabulary",
        ("training", "eos_token"),
        "must be a token of the tokenizer; leave it out to use the tokenizer's own",
    ),
    _Cause(
        r"Target modules .* not found",
        ("peft", "target_modules"),
        "match no module of this model",
    ),
    _Cause(
        r"size mismatch for base_model\.",
        ("peft",),
        "the checkpoint has an adapter of another size; set r and target_modules as in its run, or "
        "start a new run",
    ),
    _Cause(
        r"Callback requires .* to be installed",
        ("training", "report_to"),
        "names a tracker whose package is not installed; install it, or leave the tracker out",
    ),
)

_HUB = "cannot create the repository on the hub; log in with `hf auth login`, or set it to false"


def named_failure(
    document: RecipeDocument,
    error: Exception,
    *,
    network: nn.Module | None = None,
    rows: Any = None,
    tokenizer: Any = None,
) -> RecipeError | None:
    """Return an error of another library as one that names the key; ``None`` if it is not known.

    Args:
        document: Recipe that was to be run.
        error: Error of the construction of a trainer.
        network: Network that was to be trained; ``None`` if it is unknown.
        rows: Training rows; ``None`` if they are unknown.
        tokenizer: Tokenizer of the network; ``None`` without one.
    """
    text = one_line(str(error))
    for cause in _CAUSES:
        if re.search(cause.text, text) is not None:
            says = cause.says
            if cause.path[-1] == "target_modules" and network is not None:
                says = f"{says}; its linear layers are {_linear_layers(network)}"
            return document.error(cause.path, f"{says} ({type(error).__name__}: {text:.300})")
    if type(error).__name__ == "TemplateError":
        return _refused_chat(document, text, rows, tokenizer)
    training: Any = document.data.get("training") or {}
    if training.get("push_to_hub") and type(error).__module__.startswith("huggingface_hub"):
        path = ("training", "push_to_hub")
        return document.error(path, f"{_HUB} ({type(error).__name__}: {text:.300})")
    return None


def _refused_chat(document: RecipeDocument, text: str, rows: Any, tokenizer: Any) -> RecipeError:
    """Return the error for a chat that the chat template refuses, with the number of its row."""
    at = ""
    for number, row in enumerate(rows if hasattr(rows, "__len__") else (), 1):
        try:
            tokenizer.apply_chat_template(row["messages"], tokenize=False)
        except Exception:  # noqa: BLE001  (templates raise errors of jinja2, and any other)
            roles = [message.get("role") for message in row.get("messages") or ()]
            at = f" in row {number} (counted from 1), whose roles are {roles}"
            break
    says = f"the chat template of the tokenizer refuses the messages{at}: {text:.300}; change them"
    return document.error(("data",), f"{says}, or name another tokenizer")


def _linear_layers(network: nn.Module) -> list[str]:
    """Return the last part of the names of linear layers, each once."""
    names = {
        name.rpartition(".")[2]
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return sorted(names)
