"""Programs that each rank runs to count what accumulation costs under `fully_shard`."""

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from support.fsdp.networks import Case, micro_batches_of, new_model, replicated_mesh, sharded

__all__ = [
    "NUM_LAYERS",
    "NUM_MICRO_BATCHES",
    "NUM_PARAMETERS",
    "MessageBytes",
    "count_accumulation",
    "meet_an_early_nan",
]

WIDTH = 64
NUM_LAYERS = 3
NUM_PARAMETERS = NUM_LAYERS * (WIDTH * WIDTH + WIDTH)
NUM_MICRO_BATCHES = 3


class MessageBytes(TorchDispatchMode):
    """Sum the bytes that this rank passes to the collectives of a step, and count the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func._opname
        if func.namespace == "c10d" and name in {"_allgather_base_", "_reduce_scatter_base_"}:
            self.sent[name] += args[1].nbytes
            self.sent[f"number of {name}"] += 1
        elif func.namespace == "c10d" and name == "allreduce_":
            self.sent[name] += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


class _CopiedMessages(TorchDispatchMode):
    """Give copies to all collectives, wait for them, and copy their results back.

    A thread of gloo may hold the tensors of a message for a moment after the message has ended. So
    the bytes that are alive would depend on when that thread runs. With this mode it holds only
    copies, which `is_copy` tells apart, and gloo's own buffers. The latter get Python objects only
    if somebody waits for gloo's work, so the caller gets other work, which has already ended.
    """

    def __init__(self) -> None:
        super().__init__()
        # Never freed within the mode, so no other tensor gets the address of a copy.
        self._copies: list[Tensor] = []

    def is_copy(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a copy that was given to a collective."""
        return any(tensor is copy for copy in self._copies)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        copies: list[tuple[Tensor, Tensor]] = []

        def copied(tensor: Tensor) -> Tensor:
            copies.append((tensor, tensor.clone()))
            return copies[-1][1]

        result = func(*tree_map_only(Tensor, copied, args), **(kwargs or {}))
        for work in filter(_is_work, tree_leaves(result)):
            distributed.Work.unbox(work).wait()
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        self._copies += [copy for _, copy in copies]
        originals = {id(copy): tensor for tensor, copy in copies}
        result = tree_map_only(Tensor, lambda each: originals.get(id(each), each), result)
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        return tree_map_only(torch.ScriptObject, lambda _: _ended_work(tensors), result)


def _is_work(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject)


def _ended_work(tensors: list[Tensor]) -> Any:
    """Return work of a collective that has ended with some tensors as its result."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


class _Loss(nn.Module):
    """Layers of equal size, and the mean of the squares of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()


@contextlib.contextmanager
def _only_new_objects() -> Iterator[_CopiedMessages]:
    """Within the block, `_live_bytes` counts only tensors that were created in the block."""
    # The thread of `RankWatch` looks at the frames of the main thread, which keeps their tensors
    # alive. It must not be interrupted there, so threads change only where they wait.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600.0)
    gc.collect()
    gc.freeze()
    try:
        with _CopiedMessages() as messages:
            yield messages
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


def _live_bytes(messages: _CopiedMessages) -> int:
    """Return the bytes of all tensors in `_only_new_objects`, gradients included."""
    gc.collect()
    tensors = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Tensor) and not messages.is_copy(each)
    ]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = [_local(each).untyped_storage() for each in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _sharded_cell(layout: str, dtype: str, settings: dict[str, Any]) -> MFTrainOneStepCell:
    torch.manual_seed(0)
    network = _Loss()
    if layout == "DDP":
        network = DistributedDataParallel(network)
    else:
        world = distributed.get_world_size()
        mesh = replicated_mesh(world) if layout == "replicas" else init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, dtype))
        for part in (*network.layers, network):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = SGD(network.parameters(), lr=0.1, foreach=True)
    if settings.pop("ema", False):
        settings["ema"] = ExponentialMovingAverage(network)
    return MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        gradient_accumulation_steps=NUM_MICRO_BATCHES,
        **settings,
    )


def count_accumulation(
    rank: int, layout: str, dtype: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Count the bytes of tensors during an update, and the bytes of all its messages.

    Args:
        rank: Rank of this process.
        layout: ``"shards"``, ``"replicas"`` or ``"DDP"``.
        dtype: Dtype in which gradients are reduced.
        settings: Keyword arguments of the cell; ``ema`` is True for an average.

    Returns:
        ``"between updates"``: bytes of all tensors. ``"added"``: bytes in addition to them, between
        each two micro-batches and before the optimizer's step. ``"messages"``: bytes by operator.
    """
    del rank
    with _only_new_objects() as copied:
        cell = _sharded_cell(layout, dtype, dict(settings))
        inputs = torch.randn(2 * NUM_MICRO_BATCHES, WIDTH)
        # The first two updates create state, and compare the ranks.
        cell(inputs)
        cell(inputs)
        between, found = _live_bytes(copied), []

        def sample(*_: Any) -> None:
            found.append(_live_bytes(copied) - between)

        # Sample while no unit is gathered: before a forward and before the optimizer's step.
        hooks = [
            cell.network.register_forward_pre_hook(sample, prepend=True),
            cell.optimizer.register_step_pre_hook(sample),
        ]
        cell(inputs)
        for hook in hooks:
            hook.remove()
        with MessageBytes() as messages:
            cell(inputs)
    return {"between updates": between, "added": found[1:], "messages": dict(messages.sent)}


def meet_an_early_nan(rank: int, layout: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Do two updates; the first micro-batch of the first is NaN on the last rank only."""
    case = Case(layout, 2)
    network = sharded(new_model(per_token=False), case)
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    cell = MFTrainOneStepCell(
        network, optimizer, scale_sense=2.0**16, gradient_accumulation_steps=2, **settings
    )
    before = [_local(each).clone() for each in network.parameters()]
    is_bad = rank == distributed.get_world_size() - 1
    first, second = micro_batches_of(case, 0, rank)
    cell.step([(*first, float("nan") if is_bad else 1.0), second])
    kept = all(map(torch.equal, before, map(_local, network.parameters())))
    skipped = [cell.last_report.skipped.item()]
    cell.step(micro_batches_of(case, 1, rank))
    changed = not all(map(torch.equal, before, map(_local, network.parameters())))
    return {"skipped": [*skipped, cell.last_report.skipped.item()], "kept": kept, "then": changed}


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
