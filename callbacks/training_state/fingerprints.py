"""Record fingerprints of inputs, gradients and weights, by which `mfwrap compare` compares runs."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainingArguments

from mfwrap import DeferredReads, StepReport
from mfwrap.callbacks.culprit.replay.recorder import RandomState, arguments_of, tensors_in
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.step_values import PackedValues, pack, skip_flag
from mfwrap.collectives import num_ranks, this_rank
from mfwrap.compatibility.torch import matmul_precision
from mfwrap.optimizers.chained import parts_of
from mfwrap.records.fingerprints import (
    NAME,
    Fingerprint,
    Share,
    encoded,
    encoded_floats,
    joined,
)
from mfwrap.records.json_lines import rank_file
from mfwrap.records.run_files import open_records
from mfwrap.tensors.fingerprints import (
    NUM_VALUES,
    as_floats,
    bitwise_hashes,
    fingerprints,
    row_hashes,
)
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.shards import is_distributed, local_tensors, meeting_device, on_device
from mfwrap.tensors.training_forwards import is_training_forward
from mfwrap.tensors.wrappers import trainable, unwrapped_network, unwrapped_optimizer

_NUM_PIECES = 4


class _MicroBatch(NamedTuple):
    """Shapes of the inputs of one call of the network, and their hashes on the device."""

    shapes: Mapping[str, tuple[int, ...]]
    hashes: Tensor
    """Shape ``(len(shapes) + rows,)``, int64: one hash per input, then one per row."""


class _Step(NamedTuple):
    """What the host knows about a step whose fingerprints are on the device."""

    number: int
    random: Mapping[str, str]
    micro_batches: Sequence[_MicroBatch]
    packed: PackedValues | None
    """Loss and other numbers of the output; ``None`` without an output."""

    norm_names: tuple[str, ...]
    """Names of the local norms; empty without local norms."""

    num_gradients: int
    are_unscaled: bool
    num_weights: int


@final
class FingerprintRecorder:
    """Write ``fingerprints.jsonl`` of this rank.

    The fingerprints are computed on the device and copied to the host without synchronizing. They
    are written at the next `flush`.

    Args:
        args: Arguments of the Trainer; ``None`` in a loop without a Trainer.
        folder: Run folder.
        model: Network, with its wrappers; ``None`` if unknown, which leaves the inputs out.
        global_step: Steps finished before this training, as the loop counts.
        first_step: Steps finished before this training, as the records count.
        interval: Steps from one record to the next.
        is_compiled: Whether the network is compiled. Its inputs are then left out, because a hook
            would change the compiled code.

    Raises:
        OSError: If files cannot be written to the run folder.
    """

    def __init__(
        self,
        args: TrainingArguments | None,
        folder: Path,
        model: nn.Module | None,
        *,
        global_step: int,
        first_step: int,
        interval: int,
        is_compiled: bool,
    ) -> None:
        self._offset = first_step - global_step
        self._interval = interval
        self._lines = open_records(rank_file(folder, NAME, this_rank()), first_step)
        self._reads = DeferredReads()
        self._facts = _facts(args, model)
        self._random: dict[str, str] = {}
        self._micro_batches: list[_MicroBatch] = []
        # Fingerprints of the gradients of this step, on the device, and whether they are unscaled
        # as in `mfwrap.records.fingerprints.StepFingerprints`.
        self._gradients: Tensor | None = None
        self._are_unscaled = False
        self._update_hook: RemovableHandle | None = None
        self._norm_names: tuple[str, ...] = ()
        self._is_watching = False
        self._network = None if model is None else unwrapped_network(model)
        self._handle: RemovableHandle | None = None
        self._begin(first_step, is_compiled=is_compiled)

    def _begin(self, first_step: int, *, is_compiled: bool) -> None:
        """Watch the inputs, and record the weights before the first step."""
        if self._network is None or is_compiled:
            passes = "the loop passes no `model`"
            run_logger(__package__).warning(
                "TrainingStateMonitor cannot record fingerprints of inputs: %s",
                passes if self._network is None else "the network is compiled",
            )
        else:
            self._handle = self._network.register_forward_pre_hook(self._record, with_kwargs=True)
            keep_out_of_copies(self._network, self._handle)
        if self._network is not None:
            parameters = trainable(self._network)
            write = functools.partial(self._write_start, first_step, _shares(parameters))
            self._reads.submit(_fingerprints(list(parameters.values())).reshape(-1), write)

    def _is_due(self, global_step: int) -> bool:
        return global_step % self._interval == 0

    def begin_step(self, global_step: int, optimizer: Any = None) -> None:
        """Record the states of the random number generators, and the inputs from now on.

        Args:
            global_step: Number of this step: the finished steps plus one.
            optimizer: Optimizer, with or without wrappers. If the loop does not call
                `before_update`, its gradients are recorded when its step begins. ``None`` if
                unknown.
        """
        self._micro_batches, self._gradients = [], None
        self._remove_update_hook()
        self._is_watching = self._is_due(global_step)
        if self._is_watching:
            self._random = _random_states(_device_of(self._network))
            inner = unwrapped_optimizer(optimizer)
            if self._network is not None and isinstance(inner, Optimizer):
                self._update_hook = inner.register_step_pre_hook(self._at_update)

    def end_forward(self) -> None:
        """Stop recording inputs: a replay of a step, for example, also calls the network."""
        self._is_watching = False

    def before_update(self, global_step: int, model: nn.Module | None) -> None:
        """Record the gradients, if the step is recorded and there are gradients.

        Args:
            global_step: Number of this step: the finished steps plus one.
            model: Network, with or without wrappers; ``None`` if unknown.
        """
        if model is not None and self._is_due(global_step):
            self._record_gradients(model, are_unscaled=False)

    def _at_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the gradients with which the optimizer is called, if there are none yet."""
        if self._gradients is None and self._network is not None:
            # mfwrap's step and torch's GradScaler leave the division to a fused kernel, and tell it
            # by attributes. Otherwise, the gradients have been divided and clipped by now.
            is_folded = any(hasattr(part, "found_inf") for part in parts_of(optimizer))
            self._record_gradients(self._network, are_unscaled=not is_folded)

    def _record_gradients(self, model: nn.Module, *, are_unscaled: bool) -> None:
        parameters = list(trainable(model).values())
        if any(parameter.grad is not None for parameter in parameters):
            self._gradients = _fingerprints(parameters, gradients=True).reshape(-1)
            self._are_unscaled = are_unscaled

    def _remove_update_hook(self) -> None:
        handle, self._update_hook = self._update_hook, None
        if handle is not None:
            handle.remove()

    def end_step(
        self, global_step: int, model: nn.Module | None, output: Any, report: StepReport | None
    ) -> None:
        """Record the weights, if the step is recorded, and start copying the values of the step.

        Args:
            global_step: Finished steps, this one included.
            model: Network, with or without wrappers; ``None`` if unknown.
            output: Output of the step; ``None`` if the loop passes none.
            report: Report of the step; ``None`` if the loop passes none.
        """
        micro_batches, self._micro_batches = self._micro_batches, []
        gradients, self._gradients = self._gradients, None
        self._remove_update_hook()
        random, self._random = self._random, {}
        if not self._is_due(global_step):
            return
        packed = None if output is None else pack(output, skipped=skip_flag(output, report))
        local_norm: Tensor | None = getattr(output, "local_norm", None)
        names = () if report is None or local_norm is None else report.local_norm_names
        parameters = [] if model is None else list(trainable(model).values())
        weights = _fingerprints(parameters).reshape(-1) if parameters else None
        step = _Step(
            number=global_step + self._offset,
            random=random,
            micro_batches=micro_batches,
            packed=packed,
            norm_names=names,
            num_gradients=0 if gradients is None else len(gradients),
            are_unscaled=gradients is not None and self._are_unscaled,
            num_weights=0 if weights is None else len(weights),
        )
        parts = [
            *(as_floats(each.hashes).reshape(-1) for each in micro_batches),
            *(() if gradients is None else (gradients,)),
            *(() if weights is None else (weights,)),
            *((local_norm,) if local_norm is not None and names else ()),
            *(() if packed is None else (packed.tensor,)),
        ]
        if parts:
            device = meeting_device(parts)
            together = torch.cat([on_device(each, device) for each in parts])
            self._reads.submit(together, functools.partial(self._write, step))
        else:
            self._write(step, [])

    def flush(self) -> None:
        """Wait for the pending values and write them."""
        self._reads.flush()

    def close(self) -> None:
        """Remove the hooks from the network and the optimizer."""
        self._remove_update_hook()
        if self._handle is not None:
            self._handle.remove()

    def _record(
        self, network: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        if self._is_watching and is_training_forward(network):
            inputs = dict(tensors_in(arguments_of(network.forward, positional, keywords)))
            if inputs:
                self._micro_batches.append(_hashed(inputs))

    def _write_start(
        self, step: int, shares: Mapping[str, Share], host_values: Sequence[float]
    ) -> None:
        weights = encoded(_read(host_values))
        record = {"step": step, "run": self._facts, "tensors": dict(shares), "weights": weights}
        self._lines.append(record)

    def _write(self, step: _Step, host_values: Sequence[float]) -> None:
        values = iter(host_values)
        record: dict[str, Any] = {
            "step": step.number,
            "random": step.random,
            "micro_batches": [_inputs_of(each, values) for each in step.micro_batches],
        }
        for name, number in (("gradients", step.num_gradients), ("weights", step.num_weights)):
            if number:
                record[name] = encoded(_read(list(islice(values, number))))
        if step.are_unscaled:
            record["are_unscaled"] = True
        if step.norm_names:
            if step.norm_names != self._norm_names:
                self._norm_names = step.norm_names
                record["local_norm_names"] = list(step.norm_names)
            record["local_norms"] = encoded_floats(list(islice(values, len(step.norm_names))))
        packed = step.packed
        record["numbers"] = {} if packed is None else packed.unpack(list(values)).to_record()
        self._lines.append(record)


def _inputs_of(micro_batch: _MicroBatch, values: Iterator[float]) -> dict[str, Any]:
    """Take the hashes of a micro-batch from the values, and return its part of the record."""
    hashes = [
        f"{joined(list(islice(values, _NUM_PIECES))):016x}" for _ in range(len(micro_batch.hashes))
    ]
    shapes = micro_batch.shapes
    described = zip(shapes.items(), hashes, strict=False)
    return {
        "inputs": {name: f"{hash_} {list(shape)}" for (name, shape), hash_ in described},
        "rows": hashes[len(shapes) :],
    }


def _facts(args: TrainingArguments | None, model: nn.Module | None) -> dict[str, Any]:
    """Return what may make two runs differ and is not in their data."""
    parameter = None if model is None else next(model.parameters(), None)
    device = _device_of(model)
    return {
        "seed": torch.initial_seed() if args is None else args.seed,
        "data_seed": None if args is None else args.data_seed,
        "num_ranks": num_ranks(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": matmul_precision(),
    }


def _device_of(network: nn.Module | None) -> torch.device:
    """Return the device of a network's first parameter; the CPU without one."""
    parameters = iter(()) if network is None else network.parameters()
    return next((each.device for each in parameters), torch.device("cpu"))


def _random_states(device: torch.device) -> dict[str, str]:
    return {
        name: hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
        for name, state in RandomState.now(device)._asdict().items()
        if state is not None
    }


def _hashed(inputs: Mapping[str, Tensor]) -> _MicroBatch:
    """Hash the inputs and their rows: what has the same first dimension as the first input."""
    first = next(iter(inputs.values()))
    num_rows = len(first) if first.dim() else 0
    device = first.device
    total = torch.zeros(num_rows, dtype=torch.int64, device=device)
    hashes = []
    for name, tensor in inputs.items():
        [local] = local_tensors([tensor.detach()])
        rows = row_hashes(local if local.dim() else local.reshape(1))
        rows = on_device(rows, device)
        hashes.append(bitwise_hashes([rows])[0])
        if len(rows) == num_rows:
            total = total + rows * _odd_number(name)
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    return _MicroBatch(shapes, torch.cat([torch.stack(hashes), total]))


@functools.lru_cache(maxsize=256)
def _odd_number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") | 1


def _fingerprints(parameters: Sequence[nn.Parameter], *, gradients: bool = False) -> Tensor:
    """Return fingerprints of the parameters or of their gradients, shape ``(N, NUM_VALUES)``.

    A missing gradient has the fingerprint of zeros.
    """
    tensors = [_gradient(each) if gradients else each.detach() for each in parameters]
    return fingerprints(local_tensors(tensors), [_share(each)[1] for each in parameters])


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(0, device=parameter.device)
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _shares(parameters: Mapping[str, nn.Parameter]) -> dict[str, Share]:
    return {name: _share(parameter)[0] for name, parameter in parameters.items()}


def _share(parameter: Tensor) -> tuple[Share, int]:
    """Return what this rank has of a tensor, and the position of its first element."""
    if not is_distributed(parameter):
        return "whole", 0
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [dim for dim, each in enumerate(placements) if not each.is_replicate()]
    if not sharded:
        return "whole", 0
    coordinate = mesh.get_coordinate()
    # `is_shard` is true for a strided shard, too, whose rows are not contiguous.
    is_contiguous = len(sharded) == 1 and type(placements[sharded[0]]).__name__ == "Shard"
    if coordinate is None or not is_contiguous or not placements[sharded[0]].is_shard(0):
        return "local", 0
    length = parameter.shape[0]
    # FSDP and DTensor divide rows as `torch.chunk` does.
    first_row = min(-(-length // mesh.size(sharded[0])) * coordinate[sharded[0]], length)
    start = first_row * (parameter.numel() // length)
    is_first = all(c == 0 for dim, c in enumerate(coordinate) if dim not in sharded)
    if parameter.is_complex():
        start *= 2
    return ("part" if is_first else "copy"), start


def _read(host_values: Sequence[float]) -> list[Fingerprint]:
    return [
        Fingerprint.from_values(host_values[i : i + NUM_VALUES])
        for i in range(0, len(host_values), NUM_VALUES)
    ]
