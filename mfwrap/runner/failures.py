"""Name the key of a recipe that an error of another library is about."""

import functools
import re
import textwrap
from typing import Any, NamedTuple, final

from torch import nn

from mfwrap.recipes.data.conversations import as_messages
from mfwrap.recipes.data.source import DataError, DataSource, Needs
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
        r"SampleMonitor needs .* in a training without evaluations",
        ("callbacks",),
        "have a SampleMonitor without step_interval; set it, or training.eval_strategy",
    ),
    _Cause(
        r"\w+Callback requires .* to be installed",
        ("training", "report_to"),
        "names a tracker whose package is not installed; install it, or leave the tracker out",
    ),
)

_REFUSED = "the chat template of the tokenizer refuses messages"

_HUB = "cannot create the repository on the hub; log in with `hf auth login`, or set it to false"


def named_failure(
    document: RecipeDocument,
    error: Exception,
    *,
    network: nn.Module | None = None,
    source: DataSource | None = None,
    tokenizer: Any = None,
) -> RecipeError | None:
    """Return an error of another library as one that names the key; ``None`` if it is not known.

    Args:
        document: Recipe that was to be run.
        error: Error of the construction of a trainer.
        network: Network that was to be trained; ``None`` if it is unknown.
        source: Source of the data; ``None`` if it is unknown.
        tokenizer: Tokenizer of the network; ``None`` without one.
    """
    text = one_line(str(error))
    for cause in _CAUSES:
        found = re.search(cause.text, text)
        if found is not None:
            says = cause.says
            if cause.path[-1] == "target_modules" and network is not None:
                says = f"{says}; its linear layers are {_linear_layers(network)}"
            return document.error(cause.path, f"{says} ({_said(error, text[found.start() :])})")
    if type(error).__name__ == "TemplateError":
        return _refused_chat(document, text, source, tokenizer)
    training: Any = document.data.get("training") or {}
    if training.get("push_to_hub") and type(error).__module__.startswith("huggingface_hub"):
        path = ("training", "push_to_hub")
        return document.error(path, f"{_HUB} ({_said(error, text)})")
    return None


def _said(error: Exception, text: str) -> str:
    """Return the first sentence of an error, at most 250 characters of whole words."""
    sentence = textwrap.shorten(text.partition(". ")[0], 250, placeholder=" ...")
    return f"{type(error).__name__}: {sentence}"


def _refused_chat(
    document: RecipeDocument, text: str, source: DataSource | None, tokenizer: Any
) -> RecipeError:
    """Return the error for a chat that the chat template refuses, with the place of its row."""
    says = _REFUSED
    if source is not None and not source.is_streamed:
        try:
            # The rows of the training are in another order than those of the source.
            source.rows(Needs(check=functools.partial(_check_chats, tokenizer)))
        except DataError as error:
            says = str(error)
    todo = "change the roles (some templates have no 'system'), or set model.chat_template, for"
    return document.error(("data",), f"{says}: {text:.300}; {todo} example to chatml")


def _check_chats(tokenizer: Any, rows: Any) -> None:
    """Raise `DataError` for the first chat that the chat template of a tokenizer refuses."""
    for number, row in enumerate(rows, 1):
        chat = as_messages(row.get("messages") or row.get("conversations") or [], "user")
        try:
            _ = chat and tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception as error:  # templates raise errors of jinja2, and any other
            roles = [turn["role"] for turn in chat]
            msg = f"{_REFUSED} with the roles {roles}"
            raise DataError(msg, number) from error


def _linear_layers(network: nn.Module) -> list[str]:
    """Return the last part of the names of linear layers, each once."""
    names = {
        name.rpartition(".")[2]
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return sorted(names)
