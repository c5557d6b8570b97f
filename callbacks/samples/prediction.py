"""What a model predicts for rows: classes of texts, images and tokens, or numbers."""

import base64
import io
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mfwrap.arguments import described
from mfwrap.callbacks.samples.prompt import Prompt, decoded, on_device_of

_IGNORED = -100
_MOST_NUMBERS = 8
"""Number of the values of a row that are shown."""

_MOST_PIXELS = 96
"""Largest width and height of an image in the records."""


@final
class Prediction:
    """Predict the labels of rows, one row at a time.

    Args:
        model: The model. Its output is a mapping, a tuple or a tensor; ``logits``, or else the
            first tensor that is not a loss, has the predictions.
        tokenizer: Tokenizer of its inputs; ``None`` if they are no texts.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None) -> None:
        config = getattr(model, "config", None)
        self._tokenizer = tokenizer
        self._names: Mapping[Any, str] = getattr(config, "id2label", None) or {}
        kind = getattr(config, "problem_type", None)
        self._has_several = kind == "multi_label_classification"

    def of_row(self, batch: Any) -> Prompt:
        """Return a held-out row with its expected labels.

        Args:
            batch: The row as a batch of the evaluation.

        Raises:
            ValueError: If the batch is not a mapping.
        """
        if not isinstance(batch, Mapping):
            msg = f"SampleMonitor needs batches that are mappings, got {described(batch):.200}"
            raise ValueError(msg)  # noqa: TRY004  (the user's collator has made it)
        text, image = self._shown(batch)
        return Prompt(inputs=dict(batch), text=text, reference=self._expected(batch), image=image)

    def answer(self, model: Any, prompt: Prompt) -> str:
        """Return what the model predicts for a row. Synchronizes with the device.

        Raises:
            ValueError: If the output has no predictions of a known kind.
        """
        logits = _logits(model(**on_device_of(model, prompt.inputs)), model).float().cpu()
        labels = prompt.inputs.get("labels")
        are_numbers = isinstance(labels, Tensor) and labels.is_floating_point()
        if logits.numel() == 1 or (are_numbers and not self._has_several):
            return _numbers(logits)
        if logits.dim() == 2:
            return self._classes(logits[0])
        if logits.dim() == 3 and "input_ids" in prompt.inputs:
            return self._tokens(prompt.inputs, logits[0].argmax(dim=-1))
        msg = (
            "SampleMonitor shows predictions of shape (rows, classes), or (rows, tokens, classes) "
            f"for `input_ids`, got {tuple(logits.shape)} from {type(model).__name__}"
        )
        raise ValueError(msg)

    def _expected(self, batch: Mapping[str, Any]) -> str | None:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        if labels.is_floating_point() and self._has_several:
            return self._listed(labels[0].nonzero().flatten())
        if labels.is_floating_point():
            return _numbers(labels)
        if labels.dim() == 2 and "input_ids" in batch:
            return self._tokens(batch, labels[0])
        return self._listed(labels.flatten())

    def _classes(self, logits: Tensor) -> str:
        """Return the likeliest class, or all that are likely, with their probabilities."""
        shares = logits.sigmoid() if self._has_several else logits.softmax(dim=-1)
        likely = (shares > 0.5).nonzero().flatten() if self._has_several else shares.argmax()[None]
        return ", ".join(f"{self._name(each)} {shares[each]:.2f}" for each in likely)

    def _tokens(self, batch: Mapping[str, Any], classes: Tensor) -> str:
        """Return the words of a row, each with the class of its first token: ``word/CLASS``."""
        words = self._words(batch)
        return " ".join(f"{word}/{self._name(classes[start])}" for start, word in words.items())

    def _words(self, batch: Mapping[str, Any]) -> dict[int, str]:
        """Return the words of a row by the place of their first tokens.

        Without a target for each token, each token is a word. A token that is no target belongs to
        the word before it.
        """
        ids, labels = batch["input_ids"], batch.get("labels")
        starts = [*range(ids.shape[1])]
        if isinstance(labels, Tensor) and labels.shape == ids.shape:
            starts = (labels[0] != _IGNORED).nonzero().flatten().tolist()
        ends = [*starts[1:], ids.shape[1]]
        return {
            start: decoded(ids[0, start:end], self._tokenizer)
            for start, end in zip(starts, ends, strict=True)
        }

    def _listed(self, classes: Tensor) -> str:
        return ", ".join(map(self._name, classes))

    def _name(self, number: Tensor) -> str:
        return str(self._names.get(int(number), int(number)))

    def _shown(self, batch: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the text of a row, or its numbers, and its image."""
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if isinstance(ids, Tensor) and isinstance(labels, Tensor) and labels.shape == ids.shape:
            return " ".join(self._words(batch).values()), None
        if isinstance(ids, Tensor):
            return decoded(ids[0], self._tokenizer), None
        floating = {
            name: value
            for name, value in batch.items()
            if name != "labels" and isinstance(value, Tensor) and value.is_floating_point()
        }
        for name, value in floating.items():
            if value.dim() == 4 and (image := _thumbnail(value[0])) is not None:
                return f"{name} of shape {tuple(value.shape[1:])}", image
        return "; ".join(f"{name}: {_numbers(value)}" for name, value in floating.items()), None


def _logits(output: Any, model: object) -> Tensor:
    """Return the predictions in the output of a model, shape ``(1, ...)``."""
    if isinstance(output, Mapping):
        values = {name: value for name, value in output.items() if name != "loss"}
    else:
        listed = output if isinstance(output, (tuple, list)) else [output]
        values = {str(place): value for place, value in enumerate(listed)}
    found = [each for each in values.values() if isinstance(each, Tensor) and each.dim()]
    if isinstance(logits := values.get("logits"), Tensor):
        return logits
    if not found:
        msg = (
            "SampleMonitor needs a model with transformers' `generate`, or one that returns "
            f"`logits`; {type(model).__name__} returned {described(output):.200}"
        )
        raise ValueError(msg)
    return found[0]


def _numbers(values: Tensor) -> str:
    shown = [f"{value:.4g}" for value in values.flatten()[:_MOST_NUMBERS].tolist()]
    left = values.numel() - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _thumbnail(image: Tensor) -> str | None:
    """Return an image of shape ``(C, H, W)`` as a small PNG in base 64, scaled to its own range.

    Returns ``None`` if it has neither 1 nor 3 channels, or Pillow is not installed.
    """
    try:
        from PIL import Image  # noqa: PLC0415  (part of an extra)
    except ImportError:
        return None
    values = image.detach().float().cpu()
    if values.shape[0] not in {1, 3} or not values.isfinite().all():
        return None
    low, high = values.amin(), values.amax()
    pixels = ((values - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    rows = pixels.permute(1, 2, 0).numpy()
    made = Image.fromarray(rows[..., 0] if rows.shape[2] == 1 else rows)
    made.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    file = io.BytesIO()
    made.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")
