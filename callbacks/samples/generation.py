"""What a language model generates for prompts."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from mfwrap.arguments import described
from mfwrap.callbacks.samples.prompt import Prompt, decoded, on_device_of

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: mappings with ``role`` and ``content``."""

CUT = " [...]"
"""Mark of an answer that has not ended after the largest number of tokens."""

_IGNORED = -100


@final
class Generation:
    """Generate text with the method ``generate`` of transformers, one prompt at a time.

    Args:
        model: The model; its ``generation_config`` is copied.
        tokenizer: Its tokenizer; ``None`` if only token numbers are known.
        max_new_tokens: Largest number of tokens to generate.
        temperature: Temperature of sampling; ``None`` takes the likeliest token each time.
        seed: Seed of each sampling.
        is_shared: Whether all ranks generate together, because each has a part of the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_new_tokens: int,
        temperature: float | None,
        seed: int,
        is_shared: bool,
    ) -> None:
        self._tokenizer, self._seed, self._is_shared = tokenizer, seed, is_shared
        self._has_encoder = bool(model.config.is_encoder_decoder)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._num_positions: int | None = None if self._has_encoder else positions
        self._most_new = max_new_tokens
        self._config = copy.deepcopy(model.generation_config)
        self._config.num_beams = self._config.num_return_sequences = 1
        self._config.return_dict_in_generate = False
        self._config.do_sample = temperature is not None
        if temperature is not None:
            self._config.temperature = temperature
        else:
            # The values for which `generate` does not warn that they have no effect.
            self._config.temperature, self._config.top_k, self._config.top_p = 1.0, 50, 1.0
        if self._config.pad_token_id is None:
            # Nothing is padded; without a value `generate` warns each time.
            known = None if tokenizer is None else tokenizer.pad_token_id
            self._config.pad_token_id = 0 if known is None else known

    def of_prompt(self, prompt: str | Messages) -> Prompt:
        """Return a prompt of a recipe or a script, encoded.

        Raises:
            ValueError: If there is no tokenizer, or no chat template for messages, or if it refuses
                them.
        """
        if self._tokenizer is None:
            msg = "`prompts` needs a tokenizer as the Trainer's `processing_class`, got none"
            raise ValueError(msg)
        if isinstance(prompt, str):
            ids = self._tokenizer(prompt, return_tensors="pt")["input_ids"]
            return self._prompt(ids[0], prompt)
        if self._tokenizer.chat_template is None:
            msg = "`prompts` has messages, but the tokenizer has no chat template; give texts"
            raise ValueError(msg)
        messages: Any = [dict(message) for message in prompt]
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        except Exception as error:  # templates raise errors of jinja2, and any other
            roles = [message["role"] for message in messages]
            says = f"messages with the roles {roles}, which the chat template refuses: {error}"
            msg = f"`prompts` has {says}"
            raise ValueError(msg) from error
        said = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        return self._prompt(encoded["input_ids"][0], said)

    def of_row(self, batch: Any) -> Prompt:
        """Return a held-out row: what comes before its first target is the prompt.

        If all tokens are targets, the first half is the prompt. In a row of several turns or texts,
        the expected answer ends with the first of them.

        Args:
            batch: The row as a batch of the evaluation, or a list of one mapping with ``prompt``.

        Raises:
            ValueError: If the batch has neither, or the model takes other inputs than tokens.
        """
        if isinstance(batch, list) and isinstance(batch[0], Mapping) and "prompt" in batch[0]:
            return self.of_prompt(batch[0]["prompt"])
        if not isinstance(batch, Mapping):
            msg = (
                "SampleMonitor needs `prompts`, or held-out rows with `input_ids` or `prompt`, got "
                f"{described(batch):.200}"
            )
            raise ValueError(msg)  # noqa: TRY004  (the user's collator has made it)
        if self._has_encoder:
            return self._of_pair(batch)
        others = [
            name for name, value in batch.items() if _is_floating(value) and "mask" not in name
        ]
        if "input_ids" not in batch or others:
            msg = (
                "SampleMonitor needs `prompts`, or held-out rows whose inputs are `input_ids` "
                f"alone, got {sorted(batch)}"
            )
            raise ValueError(msg)
        ids, targets = batch["input_ids"][0], _targets(batch)
        first = int(targets.int().argmax()) if targets.any() else len(ids)
        run = targets[first:].int().argmin() if not targets[first:].all() else len(ids) - first
        end = first + int(run)
        # The first token is no target of its own prediction, so it may be left out of the targets.
        first = first if first > 1 else max(1, end // 2)
        reference = decoded(ids[first:end], self._tokenizer) if end > first else None
        return self._prompt(ids[:first], decoded(ids[:first], self._tokenizer), reference)

    def answer(self, model: Any, prompt: Prompt) -> str:
        """Return what the model generates after a prompt, with `CUT` if it had not ended.

        Synchronizes with the device. If all ranks generate together, call it on all of them.
        """
        if self._config.do_sample:
            torch.manual_seed(self._seed)
        inputs = on_device_of(model, prompt.inputs)
        start = 0 if self._has_encoder else inputs["input_ids"].shape[1]
        self._config.max_new_tokens = self._most_new
        if self._num_positions is not None:
            self._config.max_new_tokens = min(self._most_new, self._num_positions - start)
        found = model.generate(
            **inputs, generation_config=self._config, synced_gpus=self._is_shared
        )
        new = found[0, start:]
        is_full = len(new) - self._has_encoder >= self._config.max_new_tokens
        return decoded(new, self._tokenizer) + CUT * (is_full and not self._ends(new[-1]))

    def _ends(self, token: Tensor) -> bool:
        """Tell whether a token ends a text."""
        ends: Any = self._config.eos_token_id
        return int(token) in (ends if isinstance(ends, list) else [ends])

    def _prompt(self, ids: Tensor, text: str, reference: str | None = None) -> Prompt:
        if self._num_positions is not None:
            # The answer must have room, and at least half of the positions are the prompt's.
            room = min(self._most_new, self._num_positions // 2)
            ids = ids[room - self._num_positions :]
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
        return Prompt(inputs=inputs, text=text, reference=reference)

    def _of_pair(self, batch: Mapping[str, Any]) -> Prompt:
        """Return a row of an encoder and a decoder: its input, and its labels."""
        inputs = {
            name: value
            for name, value in batch.items()
            if name != "labels" and not name.startswith("decoder_")
        }
        ids, labels = batch.get("input_ids"), batch.get("labels")
        return Prompt(
            inputs=inputs,
            text="" if ids is None else decoded(ids[0], self._tokenizer),
            reference=None
            if labels is None
            else decoded(labels[0][labels[0] != _IGNORED], self._tokenizer),
        )


def can_generate(model: nn.Module) -> bool:
    """Return whether a model has transformers' ``generate``."""
    can: Any = getattr(model, "can_generate", None)
    return callable(can) and bool(can())


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """Return which tokens of the first row are targets, shape ``(L,)``, bool."""
    if isinstance(labels := batch.get("labels"), Tensor):
        return labels[0] != _IGNORED
    if isinstance(mask := batch.get("completion_mask"), Tensor):
        return mask[0].bool()
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == batch["input_ids"].dim():
        return mask[0].bool()
    return torch.ones_like(batch["input_ids"][0], dtype=torch.bool)


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
