"""Record at intervals what the model generates or predicts for a few inputs."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState, TrainingArguments

from mfwrap import ExponentialMovingAverage
from mfwrap.arguments import (
    check_bool,
    check_int,
    check_positive_number,
    described,
    directory_name,
)
from mfwrap.callbacks.average.ema_callback import average_in_use
from mfwrap.callbacks.samples.generation import Generation, Messages, can_generate
from mfwrap.callbacks.samples.prediction import Prediction
from mfwrap.callbacks.samples.prompt import Prompt, held_out_batches, text_tokenizer
from mfwrap.callbacks.samples.trackers import SampleTrackers
from mfwrap.callbacks.samples.undisturbed import undisturbed
from mfwrap.callbacks.shared.progress import ranks_layout
from mfwrap.callbacks.shared.run_folder import required_run_folder
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.training_weights import monitors_training
from mfwrap.collectives import gather_objects, raising_together, section_clock, this_rank
from mfwrap.records.json_lines import JsonLines
from mfwrap.records.model_samples import SAMPLES
from mfwrap.records.run_files import is_open, open_records
from mfwrap.tensors.shards import is_distributed
from mfwrap.tensors.wrappers import FSDP, is_instance_of, unwrapped_network
from mfwrap.trainer import MonitorCallback

_NUM_ROWS = 4
_MOST_CHARACTERS = 2000
"""Characters of a prompt or a reference in the records."""

_IN_THE_LOG = 80


class _Result(NamedTuple):
    """What the model has said about a prompt."""

    number: int
    """Index of the prompt."""

    is_averaged: bool
    text: str
    seconds: float


@final
@monitors_training
class SampleMonitor(MonitorCallback):
    """Record what the model says about a few held-out inputs, before, during and after training.

    - A model with transformers' ``generate`` (PEFT adapters, too) continues prompts. These are
      `prompts`, the first held-out rows, or both. Of a row, the tokens before the first target are
      the prompt, the targets are the reference; of one without a prompt, the first half is the
      prompt.
    - Any other model predicts for the first held-out rows: classes with their probabilities, the
      class of each word, or numbers. Images are shown.

    The results are in ``samples.jsonl`` in the run folder, in a table of the run page, and in
    wandb, trackio and TensorBoard, if ``args.report_to`` names them. With averaged weights (of
    `MFTrainer` or of an `EMACallback`, which comes before this callback), both weights are asked.

    Samples are taken before the first step, at each evaluation or every `step_interval` steps, and
    at the last step. In a stock Trainer, held-out rows are known from the first evaluation on.

    The training is bitwise the same as without the callback. The model is in evaluation mode, in
    the precision of an evaluation, without gradients. Random states, buffers, modes, configuration
    and data loaders are left or restored as they were. Prompts are taken one at a time; the records
    and the log have the seconds. The time counts in the Trainer's own throughput.

    On several ranks with whole models, rank 0 alone samples and the others wait for it. If ranks
    hold parts of the model (FSDP2, tensor parallelism), all of them run it together. An error is
    raised on all ranks, unless it arises within a model in parts.

    Args:
        prompts: Texts, or lists of messages with ``role`` and ``content``, for which the
            tokenizer's chat template is used; ``None`` for held-out rows alone.
        step_interval: Steps from one sample to the next; ``None`` for each evaluation.
        num_rows: Number of held-out rows; ``None`` for 4, or for none with `prompts`.
        max_new_tokens: Largest number of generated tokens.
        temperature: Temperature of sampling; ``None`` takes the likeliest token each time.
        seed: Seed of each sampling, which needs `temperature`; ``None`` for 0.
        averages: Whether to sample with averaged weights, too, if there are any.
        folder: Run folder; ``None`` for ``args.output_dir``.
        clock: Returns seconds from an arbitrary start.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or `seed` is given without `temperature`. When
            the training begins or first evaluates: if there is nothing to ask, the model neither
            generates nor predicts, it is sharded by version 1 of FSDP or by DeepSpeed, or the
            training has another `SampleMonitor` with the same folder.
    """

    def __init__(
        self,
        prompts: Sequence[str | Messages] | None = None,
        *,
        step_interval: int | None = None,
        num_rows: int | None = None,
        max_new_tokens: int = 64,
        temperature: float | None = None,
        seed: int | None = None,
        averages: bool = True,
        folder: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._given = None if prompts is None else _checked_prompts(prompts)
        if seed is not None and temperature is None:
            msg = f"`seed` needs `temperature`, got seed={seed!r} alone"
            raise ValueError(msg)
        self._interval = (
            None if step_interval is None else check_int("step_interval", step_interval)
        )
        if num_rows is None:
            num_rows = _NUM_ROWS if prompts is None else 0
        else:
            check_int("num_rows", num_rows)
        self._num_rows = num_rows
        self._max_new_tokens = check_int("max_new_tokens", max_new_tokens)
        self._temperature = (
            None
            if temperature is None
            else check_positive_number("temperature", temperature, finite=True)
        )
        self._seed = check_int("seed", 0 if seed is None else seed, minimum=0)
        self._averages = check_bool("averages", averages)
        self._folder = directory_name("folder", folder)
        self._clock = clock
        self._make_loader: Callable[[], Any] | None = None
        self._training: _Training | None = None

    def take_evaluation_loader(self, make_loader: Callable[[], Any] | None) -> None:
        """Receive the function that returns the data loader of the evaluations."""
        self._make_loader = make_loader

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        model: Any = None,
        processing_class: Any = None,
        **known: Any,
    ) -> None:
        """Open the file, encode the prompts, and sample before the first step.

        Raises:
            OSError: If files cannot be written to the run folder.
            ValueError: If there is nothing to ask, or the model cannot answer.
        """
        self._training = None
        make_loader, self._make_loader = self._make_loader, None
        evaluates = getattr(args, "eval_strategy", "no") != "no"
        has_inputs = self._num_rows == 0 or make_loader is not None
        if not evaluates and (self._interval is None or not has_inputs):
            lacking = "`step_interval`" if self._interval is None else "`prompts`"
            msg = f"SampleMonitor needs {lacking} in a training without evaluations, got None"
            raise ValueError(msg)
        network = unwrapped_network(model)
        is_shared = _is_shared(network, args)
        task = self._task_of(network, text_tokenizer(processing_class), is_shared=is_shared)
        self._training = training = _Training(task, is_shared)
        with raising_together():
            if this_rank() == 0:
                folder = required_run_folder(self._folder, args, type(self).__name__)
                file = folder / f"{SAMPLES}.jsonl"
                if is_open(file):
                    msg = (
                        f"SampleMonitor needs a folder of its own, got a second one that writes "
                        f"{file}; give one of them `prompts` and `num_rows`, and leave out the "
                        "other, or set `folder`"
                    )
                    raise ValueError(msg)
                training.lines = open_records(file, state.global_step)
                training.trackers = SampleTrackers(args)
        if has_inputs:
            self._read(training, network, make_loader)
            if state.global_step == 0:
                self._sample(state, network, known.get("optimizer"))

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState,
        *_: Any,
        model: Any = None,
        **known: Any,
    ) -> None:
        """Sample if the step is due, or is the last one."""
        if self._is_due(state):
            self._sample(state, unwrapped_network(model), known.get("optimizer"))

    def on_evaluate(
        self,
        args: TrainingArguments,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState,
        *_: Any,
        model: Any = None,
        **known: Any,
    ) -> None:
        """Sample at an evaluation of the training, once if there are several data sets."""
        if self._training is None:
            return
        network = unwrapped_network(model)
        if not self._training.has_prompts:
            loader = known.get("eval_dataloader")
            self._read(self._training, network, lambda: loader)
        if self._interval is None or self._is_due(state):
            self._sample(state, network, known.get("optimizer"))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write everything to disk."""
        if self._training is not None and self._training.trackers is not None:
            self._training.trackers.close()
        self._training = None

    def _is_due(self, state: TrainerState) -> bool:
        step = state.global_step
        is_due = self._interval is not None and step % self._interval == 0
        return is_due or step >= state.max_steps > 0

    def _task_of(
        self, network: nn.Module, tokenizer: PreTrainedTokenizerBase | None, *, is_shared: bool
    ) -> Generation | Prediction:
        if can_generate(network):
            return Generation(
                network,
                tokenizer,
                max_new_tokens=self._max_new_tokens,
                temperature=self._temperature,
                seed=self._seed,
                is_shared=is_shared,
            )
        if self._given is not None or self._temperature is not None:
            msg = (
                "`prompts` and `temperature` need a model with transformers' `generate`, got "
                f"{type(network).__name__}"
            )
            raise ValueError(msg)
        return Prediction(network, tokenizer)

    def _read(
        self,
        training: "_Training",
        network: nn.Module,
        make_loader: Callable[[], Any] | None,
    ) -> None:
        """Encode the prompts, or read the held-out rows; rank 0 does so for all ranks."""
        task = training.task
        with raising_together(), undisturbed(network):  # rows may be drawn at random
            if self._given is not None and isinstance(task, Generation):
                training.prompts = [task.of_prompt(each) for each in self._given]
            if self._num_rows and make_loader is not None:
                loader = make_loader()
                batches = held_out_batches(loader, self._num_rows) if this_rank() == 0 else []
                training.prompts += [task.of_row(each) for each in batches]
        if training.is_shared:
            training.prompts = gather_objects(training.prompts)[0]
        training.has_prompts = True

    def _sample(self, state: TrainerState, network: nn.Module, optimizer: Any) -> None:
        """Ask the model and write its answers, once at a step; call it on all ranks."""
        training, step = self._training, state.global_step
        if training is None or not training.has_prompts or training.last_step == step:
            return
        training.last_step = step
        average = average_in_use(state, optimizer) if self._averages and step > 0 else None
        with section_clock.left_out():
            # A network in parts starts collectives, which one rank must not miss for an error.
            found = self._results(training, network, average) if training.is_shared else []
            with raising_together():
                if this_rank() == 0:
                    if not training.is_shared:
                        found = self._results(training, network, average)
                    training.write(step, found)

    def _results(
        self, training: "_Training", network: nn.Module, average: ExponentialMovingAverage | None
    ) -> list[_Result]:
        """Ask the raw weights, and the averaged ones if there are any."""
        results = []
        for is_averaged in (False, True) if average is not None else (False,):
            swapped = average.swap() if average is not None and is_averaged else None
            with swapped or contextlib.nullcontext(), undisturbed(network):
                for number, prompt in enumerate(training.prompts):
                    start = self._clock()
                    text = training.task.answer(network, prompt)
                    results.append(_Result(number, is_averaged, text, self._clock() - start))
        return results


@dataclass(slots=True)
class _Training:
    """What a `SampleMonitor` knows about one training."""

    task: Generation | Prediction
    is_shared: bool
    """Whether all ranks run the model together."""

    prompts: list[Prompt] = field(default_factory=list)
    has_prompts: bool = False
    """Whether rank 0 has its prompts, the same on all ranks."""

    last_step: int | None = None
    """Step of the last samples."""

    are_described: bool = False
    """Whether the records say what the prompts are."""

    lines: JsonLines | None = None
    """Records; ``None`` on other ranks than 0."""

    trackers: SampleTrackers | None = None

    def write(self, step: int, results: Sequence[_Result]) -> None:
        """Write the results of a step to the records, the trackers and the log."""
        rows = []
        for number, is_averaged, text, seconds in results:
            prompt = self.prompts[number]
            record: dict[str, Any] = {"step": step, "prompt": number, "averaged": is_averaged}
            if not (self.are_described or is_averaged):
                record |= _description(prompt)
            if self.lines is not None:
                self.lines.append({**record, "text": text, "seconds": round(seconds, 4)})
            weights = "averaged" if is_averaged else "raw"
            rows.append((prompt.text, prompt.reference or "", weights, text))
        self.are_described = True
        if self.trackers is not None:
            self.trackers.log(step, rows)
        if results:
            run_logger(__package__).info(
                "Samples of step %d, in %.2f s: %r -> %r",
                step,
                sum(each.seconds for each in results),
                _shortened(self.prompts[0].text),
                _shortened(results[0].text),
            )


def _description(prompt: Prompt) -> dict[str, str]:
    """Return what the first record of a prompt says about it."""
    facts = {
        "input": prompt.text[:_MOST_CHARACTERS],
        "reference": prompt.reference and prompt.reference[:_MOST_CHARACTERS],
        "image": prompt.image,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _shortened(text: str) -> str:
    return text if len(text) <= _IN_THE_LOG else f"{text[:_IN_THE_LOG]}..."


def _checked_prompts(prompts: object) -> list[str | Messages]:
    """Return prompts after a check of their form.

    Raises:
        TypeError: If `prompts` is not a list of texts and lists of messages.
        ValueError: If there is no prompt, or an empty one.
    """
    if not isinstance(prompts, (list, tuple)):
        msg = f"`prompts` must be a list of texts or messages, got {described(prompts):.200}"
        raise TypeError(msg)
    for number, prompt in enumerate(prompts, start=1):
        if (fault := _fault_of(prompt)) is not None:
            msg = (
                "`prompts` must hold texts, or lists of messages with `role` and `content`, got "
                f"{fault} in prompt {number}"
            )
            raise TypeError(msg)
    if not all(prompts) or not prompts:
        msg = f"`prompts` must hold at least one prompt and no empty ones, got {prompts!r:.200}"
        raise ValueError(msg)
    return list(prompts)


def _fault_of(prompt: object) -> str | None:
    """Say what of a prompt is wrong; ``None`` if it is a text or a list of messages."""
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, (list, tuple)):
        return f"{described(prompt):.200}"
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, Mapping):
            return f"{described(message):.200} as message {number}"
        if not {"role", "content"} <= message.keys():
            return f"a message with the keys {sorted(map(str, message))!s:.200} (message {number})"
    return None


def _is_shared(network: nn.Module, args: TrainingArguments) -> bool:
    """Return whether ranks hold parts of a network, so that all of them must run it together.

    Raises:
        ValueError: If ``generate`` and single calls do not work with the parts.
    """
    is_version_1 = any(
        is_instance_of(part, FSDP, "FullyShardedDataParallel") for part in network.modules()
    )
    if is_version_1 or getattr(args, "deepspeed", None):
        got = "version 1 of FSDP" if is_version_1 else "DeepSpeed"
        msg = f"SampleMonitor needs a whole model, FSDP2 or tensor parallelism, got {got}"
        raise ValueError(msg)
    layout = ranks_layout()
    has_layout = layout is not None and layout.non_data_parallel_size > 1
    return has_layout or any(is_distributed(each) for each in network.parameters())
