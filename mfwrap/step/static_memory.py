"""Give the batches and the results of a captured step memory that stays the same."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.arguments import described
from mfwrap.compatibility.torch import foreach_copy_, pytree
from mfwrap.outputs import StepReport
from mfwrap.step.calls import NetworkCall

_PLAIN = (bool, int, float, str, type(None))


@final
class StaticBatch:
    """Tensors that each batch is copied into.

    Args:
        calls: Calls of the network with the first batch.
        device: Training device.

    Raises:
        TypeError: If the batch holds anything but tensors, numbers, strings and ``None``, in
            mappings, lists and tuples.
        ValueError: If a tensor is on another device.
    """

    def __init__(self, calls: Sequence[NetworkCall], device: torch.device) -> None:
        leaves, self._structure = pytree.tree_flatten(list(calls))
        self._places = _places(calls)
        for place, leaf in zip(self._places, leaves, strict=True):
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                msg = (
                    "a batch must hold tensors, numbers, strings and None with capture=True, got "
                    f"{described(leaf)} at {place}"
                )
                raise TypeError(msg)
            if isinstance(leaf, Tensor) and leaf.device != device:
                msg = (
                    f"the tensors of a batch must be on {device} with capture=True, got a tensor "
                    f"on {leaf.device} at {place}"
                )
                raise ValueError(msg)
        self._leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self._tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.calls: list[NetworkCall] = pytree.tree_unflatten(self._leaves, self._structure)
        """Calls of the network with the tensors that `load` fills."""

    @torch.no_grad()
    def load(self, calls: Sequence[NetworkCall]) -> None:
        """Copy a batch into the tensors; does not synchronize with the device.

        Raises:
            ValueError: If the batch differs from the first one in more than the tensors' values.
        """
        leaves, structure = pytree.tree_flatten(list(calls))
        if structure != self._structure:
            msg = (
                "each batch must have the form of the first one with capture=True, got values at "
                f"{', '.join(_places(calls))} instead of {', '.join(self._places)}"
            )
            raise ValueError(msg)
        for place, leaf, own in zip(self._places, leaves, self._leaves, strict=True):
            if _fixed(leaf) != _fixed(own):
                msg = (
                    "each batch must have the shapes, dtypes and numbers of the first one with "
                    f"capture=True, got {_shown(leaf)} instead of {_shown(own)} at {place}; leave "
                    "out a smaller last batch, or pad it"
                )
                raise ValueError(msg)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if given:
            foreach_copy_(self._tensors, given, non_blocking=True)


def _places(calls: Sequence[NetworkCall]) -> list[str]:
    """Return where the values of a batch are, for errors."""
    return [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(list(calls))]


def _fixed(leaf: Any) -> Any:
    """Return what must be the same in each batch."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"shape {tuple(leaf.shape)}, {leaf.dtype} on {leaf.device}"
    return described(leaf)


class _Pack(NamedTuple):
    """Results of one dtype, joined in a tensor that stays the same."""

    joined: Tensor
    indices: list[int]
    shapes: list[torch.Size]


@final
class StaticResults:
    """Results of a step in tensors that stay the same, from which each step gets copies."""

    def __init__(self) -> None:
        self._packs: dict[torch.dtype, _Pack] = {}
        self._values: list[Any] = []
        self._structure: Any = None

    @torch.no_grad()
    def hold(self, report: StepReport, local_norm: Tensor) -> None:
        """Copy the results of a step into the tensors; does not synchronize with the device.

        Args:
            report: Report of the step.
            local_norm: Local norms of the step, shape ``(G,)``, float32.
        """
        fields = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
        fields["losses"] = dict(report.losses)
        self._values, self._structure = pytree.tree_flatten((fields, local_norm))
        tensors = [(i, v) for i, v in enumerate(self._values) if isinstance(v, Tensor)]
        for dtype in dict.fromkeys(tensor.dtype for _, tensor in tensors):
            indices = [i for i, tensor in tensors if tensor.dtype == dtype]
            joined = torch.cat([self._values[i].reshape(-1) for i in indices])
            known = self._packs.get(dtype)
            if known is None or known.joined.shape != joined.shape:
                known = _Pack(torch.empty_like(joined), [], [])
            known.joined.copy_(joined)
            shapes = [self._values[i].shape for i in indices]
            self._packs[dtype] = _Pack(known.joined, indices, shapes)
        # Keep no tensor of the step: its memory belongs to the graph.
        for i, _ in tensors:
            self._values[i] = None

    def copied(self) -> tuple[StepReport, Tensor]:
        """Return copies of the report and of the local norms that the tensors hold."""
        values = list(self._values)
        for joined, indices, shapes in self._packs.values():
            parts = joined.clone().split([shape.numel() for shape in shapes])
            for i, part, shape in zip(indices, parts, shapes, strict=True):
                values[i] = part.view(shape)
        fields, local_norm = pytree.tree_unflatten(values, self._structure)
        return StepReport(**fields), local_norm
