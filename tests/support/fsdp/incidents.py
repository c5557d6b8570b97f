"""Programs that each rank runs with sharded parameters: bad losses, errors, counts, and norms."""

import contextlib
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    clip_by_global_norm,
)
from mfwrap.step.ranks.local_norms import tap
from mfwrap.tensors.sharded_norms import has_non_finite, square_of_all
from mfwrap.tensors.wrappers import distributed_parts
from support.fsdp.networks import (
    Case,
    micro_batches_of,
    new_model,
    optimizer_of,
    replicated_mesh,
    sharded,
)
from support.host_reads import HostReads

__all__ = [
    "OPTIMIZERS",
    "Messages",
    "call_a_module_twice",
    "count_host_reads",
    "count_messages",
    "evaluate_with_averages",
    "fail_in_a_micro_batch",
    "forget_norms",
    "keep_the_state",
    "meet_a_bad_loss",
    "meet_a_bad_loss_everywhere",
    "new_cell",
    "norms_of_placed_tensors",
    "replace_parameters",
    "train_with_a_divisor",
]

OPTIMIZERS = ["fused AdamW", "fused SGD", "foreach SGD"]
NAN = float("nan")


def new_cell(network: nn.Module, optimizer: str, **settings: Any) -> MFTrainOneStepCell:
    """Return a cell that clips, with the optimizer of this name."""
    return MFTrainOneStepCell(
        network,
        optimizer_of(optimizer, network),
        use_clip_grad=True,
        max_grad_norm=0.5,
        **{"scale_sense": 2.0**10} | settings,
    )


def _local_tensors(cell: MFTrainOneStepCell) -> list[Tensor]:
    """Return copies of this rank's shards: weights, then averages, then optimizer state."""
    state = cell.optimizer.state
    tensors: list[Tensor] = [*cell.network.parameters()]
    if cell.ema is not None:
        tensors += [average for _, average in cell.ema.named_averages()]
    for parameter in cell.network.parameters():
        tensors += [value for _, value in sorted(state.get(parameter, {}).items())]
    with torch.no_grad():
        return [
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()
            for tensor in tensors
        ]


def meet_a_bad_loss(
    rank: int, optimizer: str, factor: float, *, everywhere: bool = False
) -> dict[str, Any]:
    """Train with bad losses in steps 0 and 2, and train again without those steps.

    Args:
        rank: Rank of this process.
        optimizer: Name of the optimizer.
        factor: Factor by which the bad losses are multiplied.
        everywhere: Whether the loss is bad on every rank; if False, on the last rank only.
    """
    if rank < distributed.get_world_size() - 1 and not everywhere:
        factor = 1.0

    def train(factors: Sequence[float | None]) -> tuple[list[list[Tensor]], list[Any]]:
        case = Case(accumulation=2)
        network = sharded(new_model(per_token=False), case)
        cell = new_cell(
            network,
            optimizer,
            scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 100),
            ema=ExponentialMovingAverage(network, decay=0.75),
            local_norm=True,
            use_skip_data_by_global_norm=True,
            global_norm_spike_threshold=100.0,
        )
        kept, reports = [_local_tensors(cell)], []
        for step, number in enumerate(factors):
            if number is not None:
                first, second = micro_batches_of(case, step, rank)
                cell.step([first, (*second, number)])
                kept.append(_local_tensors(cell))
                reports.append(cell.last_report)
        return kept, reports

    kept, reports = train([factor, 1.0, factor, 1.0])
    clean, _ = train([None, 1.0, None, 1.0])
    return {
        "skipped": [report.skipped.item() for report in reports],
        "overflow": [report.output.overflow.item() for report in reports],
        "norms": [report.output.global_norm.item() for report in reports],
        "own is finite": [report.output.local_norm.isfinite().all().item() for report in reports],
        "weights and averages after a first skip": _are_equal(kept[0], kept[1][: len(kept[0])]),
        "all after a later skip": _are_equal(kept[2], kept[3]),
        "end is that without the skipped steps": _are_equal(kept[4], clean[2]),
        "changes when applied": not _are_equal(kept[3], kept[4]),
    }


def meet_a_bad_loss_everywhere(rank: int, optimizer: str, factor: float) -> dict[str, Any]:
    """Run `meet_a_bad_loss` with losses that are bad on all ranks."""
    return meet_a_bad_loss(rank, optimizer, factor, everywhere=True)


def _are_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


class Messages(TorchDispatchMode):
    """Count the messages between ranks, by operator and number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.sent[func._opname, sum(tensor.numel() for tensor in tensors)] += 1
        return func(*args, **(kwargs or {}))


def count_messages(rank: int, case: Case) -> dict[str, Any]:
    """Compare the messages of a step with those of a plain forward and backward.

    Returns:
        ``"more"``: messages that only the step sends. ``"less"``: messages that the step omits.
    """
    network = sharded(new_model(per_token=case.per_token), case)
    cell = new_cell(
        network,
        "fused AdamW",
        local_norm=True,
        ema=ExponentialMovingAverage(network),
        calculate_per_token_loss=case.per_token,
    )
    [batch] = micro_batches_of(case, 0, rank)
    cell(*batch)
    with Messages() as plain:
        loss = network(*batch)
        (loss[0] if case.per_token else loss).backward()
    network.zero_grad()
    with Messages() as ours:
        cell(*batch)
    return {"more": dict(ours.sent - plain.sent), "less": dict(plain.sent - ours.sent)}


def count_host_reads(rank: int, optimizer: str) -> list[str]:
    """Return the names of the host reads of three steps, after a step that compares the ranks."""
    case = Case()
    network = sharded(new_model(per_token=False), case)
    cell = new_cell(
        network,
        optimizer,
        local_norm=True,
        scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 100),
        ema=ExponentialMovingAverage(network),
    )
    names = []
    for step in range(4):
        [batch] = micro_batches_of(case, step, rank)
        with HostReads() as reads:
            cell(*batch)
        names += reads.names if step else []
    return names


def fail_in_a_micro_batch(rank: int) -> dict[str, Any]:
    """Train with and without failed attempts of steps; return whether the final states are equal.

    In a failed attempt, the forward of the second micro-batch raises. If the next step raises
    because of it, return its message instead.
    """
    ends = []
    for fails in (True, False):
        case = Case(accumulation=2)
        network = sharded(new_model(per_token=False), case)
        cell = new_cell(network, "fused SGD")
        for step in range(3):
            first, second = micro_batches_of(case, step, rank)
            if fails and step > 0:
                with contextlib.suppress(RuntimeError):
                    cell.step([first, (second[0][:, :3], second[1])])
            try:
                cell.step([first, second])
            except RuntimeError as error:
                return {"refused": str(error)}
        ends.append(_local_tensors(cell))
    return {"is as if it had not been tried": _are_equal(*ends)}


@torch.no_grad()
def evaluate_with_averages(rank: int) -> dict[str, bool]:
    """Evaluate before, inside and after a swap of the averages, and after copies of them.

    The whole network is one FSDP unit, whose parameters stay gathered after each forward.
    """
    case = Case("root")
    [batch] = micro_batches_of(case, 0, rank)
    network = sharded(new_model(per_token=False), case)
    network(*batch)
    # The parameters are gathered now; the optimizer and the average must still use the shards.
    optimizer = optimizer_of("fused AdamW", network)
    ema = ExponentialMovingAverage(network, decay=0.5)
    del optimizer
    first = network(*batch)
    network.reshard()
    for parameter in network.parameters():
        parameter.to_local().add_(0.5)
    raw = network(*batch)
    ema.update()
    with ema.swap():
        averaged = network(*batch)
        listed = ExponentialMovingAverage(list(_resharded(network).parameters()))
        network(*batch)
    again = network(*batch)
    expected = new_model(per_token=False)
    for parameter in expected.parameters():
        # All weights have moved by 0.5. With a decay of 0.5, the averages of the trained weights
        # have moved half as far. Frozen weights have no average.
        parameter.add_(0.25 if parameter.requires_grad else 0.5)
    copies = {
        "copied": ema.copy_to,
        "copied by name": functools.partial(ema.copy_to, network),
        "copied by position": functools.partial(listed.copy_to, network),
    }
    shown = {}
    for name, copy in copies.items():
        for parameter in _resharded(network).parameters():
            parameter.to_local().add_(1.0 if parameter.requires_grad else 0.0)
        network(*batch)
        copy()
        outputs = (network(*batch), _resharded(network)(*batch))
        shown[name] = all(torch.equal(output, averaged) for output in outputs)
    return shown | {
        "raw weights moved": not torch.equal(first, raw),
        "averages inside": torch.allclose(averaged, expected(*batch), rtol=1e-5),
        "raw weights after": torch.equal(again, raw),
        "averages are shards": all(
            average.to_local().numel() == weight.to_local().numel()
            for (_, average), weight in zip(
                ema.named_averages(),
                [p for p in _resharded(network).parameters() if p.requires_grad],
                strict=True,
            )
        ),
    }


def _resharded(network: nn.Module) -> nn.Module:
    network.reshard()
    return network


def norms_of_placed_tensors(rank: int) -> dict[str, Any]:
    """Return the squared norms of tensors that are sharded, replicated, both, or neither."""
    world = distributed.get_world_size()
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(5, 3, generator=generator) for _ in range(6)]
    line = init_device_mesh("cpu", (world,))
    grid = replicated_mesh(world)
    tensors = [
        values[0],
        distribute_tensor(values[1], line, [Shard(0)]),
        distribute_tensor(values[2], line, [Replicate()]),
        distribute_tensor(values[3], grid, [Replicate(), Shard(1)]),
        distribute_tensor(values[4], grid, [Shard(0), Shard(1)]),
        # Shard over the second mesh dimension only: the ranks of each group along this dimension
        # together hold a full copy.
        distribute_tensor(values[5], grid["shard"], [Shard(0)]),
    ]
    cpu = torch.device("cpu")
    spoilt = values[0].clone()
    if rank == 0:
        spoilt[0, 0] = NAN
    return {
        "ours": square_of_all(tensors, cpu).item(),
        "expected": torch.stack(values).double().square().sum().item(),
        "one by one": [square_of_all([tensor], cpu).item() for tensor in tensors],
        "each expected": [value.double().square().sum().item() for value in values],
        "finite": has_non_finite(tensors, cpu).item(),
        "nan on rank 0": has_non_finite([spoilt, *tensors[1:]], cpu).item(),
        "clipped": square_of_all(clip_by_global_norm(tensors, 0.5), cpu).item(),
        "nan norm": square_of_all([spoilt, *tensors[1:]], cpu).isnan().item(),
    }


def train_with_a_divisor(rank: int) -> dict[str, Any]:
    """Train twice with a per-token loss, and return the results of both trainings.

    FSDP sums the gradients over ranks in the first training, and averages them in the second.
    """
    ends = []
    for divides_by_one in (True, False):
        case = Case(per_token=True)
        network = sharded(new_model(per_token=True), case)
        if divides_by_one:
            for part in network.modules():
                if hasattr(part, "set_gradient_divide_factor"):
                    part.set_gradient_divide_factor(1.0)
                    part.set_force_sum_reduction_for_comms(enable=True)
        cell = new_cell(network, "fused SGD", calculate_per_token_loss=True)
        outputs = [cell.step(micro_batches_of(case, step, rank)) for step in range(2)]
        ends.append([*_local_tensors(cell), *(output.global_norm for output in outputs)])
    return {"ends": ends}


def forget_norms(rank: int) -> dict[str, int]:
    """Return the number of norms that a step leaves of a part under DistributedDataParallel."""
    case = Case("partly replicated")
    network = sharded(new_model(per_token=False), case)
    cell = new_cell(network, "fused SGD", local_norm=True)
    cell(*micro_batches_of(case, 0, rank)[0])
    [part] = distributed_parts(network)
    return {"left": len(tap(part).squares)}


def keep_the_state(rank: int) -> dict[str, bool]:
    """Return which entries of a fused optimizer's state are distributed after a step."""
    case = Case()
    network = sharded(new_model(per_token=False), case)
    cell = new_cell(network, "fused AdamW")
    cell(*micro_batches_of(case, 0, rank)[0])
    state = next(iter(cell.optimizer.state.values()))
    return {name: isinstance(value, DTensor) for name, value in state.items()}


def call_a_module_twice(rank: int) -> dict[str, Tensor]:
    """Return the local norms of a module that a forward calls twice, and the expected norms."""
    [(inputs, _)] = micro_batches_of(Case(), 0, rank)
    torch.manual_seed(0)
    plain, network = _Twice(), _Twice()
    network.load_state_dict(plain.state_dict())
    fully_shard(network.layer, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    output = new_cell(network, "fused SGD", local_norm=True)(inputs)
    plain.double()(inputs.double()).backward()
    return {
        "ours": output.local_norm,
        "expected": torch.stack([p.grad.norm() for p in plain.parameters()]).float(),
    }


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.layer(inputs)).square().mean()


def replace_parameters(rank: int) -> dict[str, Any]:
    """Return local norms with and without new parameters put into the sharded network."""
    [batch] = micro_batches_of(Case(), 0, rank)
    norms = {}
    for key in ("expected", "replaced"):
        network = sharded(new_model(per_token=False), Case())
        if key == "replaced":
            for module in network.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    new = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    setattr(module, name, new)
        norms[key] = new_cell(network, "fused AdamW", local_norm=True)(*batch).local_norm
    return norms
