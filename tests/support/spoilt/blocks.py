"""Train a small network under a monitor, with planted faults in any of its blocks."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from mfwrap import DynamicLossScaleUpdateCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.records.json_lines import rank_file, read_json_lines

__all__ = ["NUM_BLOCKS", "Batch", "Blocks", "Fault", "batches_of", "records_of", "train_blocks"]

NUM_BLOCKS = 4
_WIDTH = 8
_BATCH = 6
_VALUES = {"nan": float("nan"), "inf": float("inf")}


class Fault(NamedTuple):
    """A planted fault."""

    step: int
    """Step of the fault, counted from 1."""

    kind: str
    """``"activation"``, ``"gradient"`` (of an output), ``"weight gradient"``, ``"data"``,
    ``"blow-up"`` (a weight grows) or ``"drift"`` (a weight changes a little)."""

    block: int = 0
    value: str = "nan"
    """``"nan"`` or ``"inf"``."""

    micro_batch: int = 0
    row: int = 0


class _SpoilGradient(torch.autograd.Function):
    """Return a tensor unchanged in the forward; multiply its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None


class _Block(nn.Module):
    """A residual linear layer with dropout, and with the faults that a batch's codes select."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self._number = number

    def forward(self, hidden: Tensor, forward_codes: Tensor, backward_codes: Tensor) -> Tensor:
        table = torch.stack(
            [hidden.new_ones(()), hidden.new_full((), torch.nan), hidden.new_full((), torch.inf)]
        )
        hidden = hidden + nn.functional.dropout(nn.functional.relu(self.linear(hidden)), 0.1)
        hidden = hidden * table[forward_codes[self._number]]
        return _SpoilGradient.apply(hidden, table[backward_codes[self._number]])


class Blocks(nn.Module):
    """A sequence of blocks and a head; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block(number) for number in range(NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, inputs: Tensor, targets: Tensor, codes: Tensor, indices: Tensor) -> Tensor:
        """Return the mean squared error.

        Args:
            inputs: Shape ``(batch, 8)``.
            targets: Shape ``(batch, 1)``.
            codes: Faults of each block in forward and backward, shape ``(2, 4)``: 0 none, 1 NaN,
                2 infinity.
            indices: Data set indices of the rows; not used.
        """
        del indices
        for block in self.blocks:
            inputs = block(inputs, codes[0], codes[1])
        return nn.functional.mse_loss(self.head(inputs), targets)


class Batch(NamedTuple):
    """A micro-batch."""

    inputs: Tensor
    targets: Tensor
    codes: Tensor
    indices: Tensor


def batches_of(step: int, seed: int, num: int, faults: Sequence[Fault]) -> list[Batch]:
    """Return the micro-batches of a step, with their faults."""
    found = []
    for number in range(num):
        generator = torch.Generator().manual_seed(10007 * seed + 101 * step + number)
        inputs = torch.randn(_BATCH, _WIDTH, generator=generator)
        batch = Batch(
            inputs,
            inputs[:, :1] * 0.5 + 0.1 * torch.randn(_BATCH, 1, generator=generator),
            torch.zeros(2, NUM_BLOCKS, dtype=torch.int64),
            torch.arange(_BATCH) + _BATCH * (num * step + number),
        )
        for fault in faults:
            if (fault.step, fault.micro_batch) == (step, number):
                _spoil(batch, fault)
        found.append(batch)
    return found


def _spoil(batch: Batch, fault: Fault) -> None:
    code = 1 if fault.value == "nan" else 2
    if fault.kind == "data":
        batch.inputs[fault.row, 3] = _VALUES[fault.value]
    elif fault.kind in {"activation", "gradient"}:
        batch.codes[0 if fault.kind == "activation" else 1, fault.block] = code


def train_blocks(
    monitor: TrainingStateMonitor,
    faults: Sequence[Fault] = (),
    *,
    callbacks: Sequence[TrainerCallback] = (),
    num_steps: int = 30,
    seed: int = 0,
    num_micro_batches: int = 2,
    scale: Any = None,
    local_norm: bool = True,
    warmup: int = 5,
    sends_pre_optimizer_step: bool = True,
    saved_run: Any = None,
    first_step: int = 1,
    network: nn.Module | None = None,
    optimizer_state: dict[str, Any] | None = None,
) -> Blocks:
    """Train in an accelerate loop with clipping and a warm-up, under a monitor.

    The optimizer begins with `optimizer_state` unless it is empty, and leaves its state there.

    Returns:
        The trained network.
    """
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_micro_batches)
    scale = DynamicLossScaleUpdateCell(2.0**16, 2, 8) if scale is None else copy.deepcopy(scale)
    attached = attach(accelerator, StepConfig(local_norm=local_norm), scale_sense=scale)
    inner = Blocks() if network is None else network
    optimizer = torch.optim.AdamW(inner.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup)
    model, optimizer, schedule = accelerator.prepare(inner, optimizer, schedule)
    if optimizer_state:
        optimizer.load_state_dict(optimizer_state)
    state = TrainerState(
        max_steps=num_steps,
        global_step=first_step - 1,
        is_world_process_zero=accelerator.is_main_process,
    )
    handler = CallbackHandler([monitor, *callbacks], inner, None, optimizer, schedule)
    control = TrainerControl()
    if saved_run is not None:
        monitor.saved_run = saved_run
    torch.manual_seed(seed)
    handler.call_event("on_train_begin", None, state, control)
    for step in range(first_step, num_steps + 1):
        hooks = _blow_up_or_hook(inner, [fault for fault in faults if fault.step == step])
        handler.call_event("on_step_begin", None, state, control)
        for batch in batches_of(step, seed + accelerator.process_index, num_micro_batches, faults):
            with accelerator.accumulate(model):
                accelerator.backward(model(*batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if sends_pre_optimizer_step:
                        handler.call_event("on_pre_optimizer_step", None, state, control)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        state.global_step = step
        outputs = {"step_output": attached.last_output, "step_report": attached.last_report}
        handler.call_event("on_step_end", None, state, control, **outputs)
        if control.should_training_stop:
            break
    handler.call_event("on_train_end", None, state, control)
    if optimizer_state is not None:
        optimizer_state |= optimizer.state_dict()
    return inner


def _blow_up_or_hook(network: Blocks, faults: Sequence[Fault]) -> list[Any]:
    hooks = []
    for fault in faults:
        weight = network.blocks[fault.block].linear.weight
        if fault.kind == "blow-up":
            weight.data.mul_(1e4)
        elif fault.kind == "drift":
            weight.data[fault.row, 3] += 1e-4
        elif fault.kind == "weight gradient":
            value = _VALUES[fault.value]
            hooks.append(weight.register_hook(lambda gradient, v=value: gradient * v))
    return hooks


def records_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return what a rank has recorded about anomalies; an empty list without a file."""
    path = rank_file(folder, "anomalies", rank)
    return read_json_lines(path) if path.exists() else []


def first_records_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the records of a rank with which episodes begin."""
    return [record for record in records_of(folder, rank) if "cause" in record]
