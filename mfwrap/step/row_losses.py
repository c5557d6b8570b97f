"""Take the loss of each row of a micro-batch from the forward pass that is trained.

torch keeps what the backward of a loss needs: the log-probabilities of a cross entropy with its
targets, or both arguments of a squared error. The losses of the targets are read from there. This
takes one number per target and no second pass over the logits. If torch has kept nothing (the
network is compiled, or has a loss of its own), or keeps it through hooks (offloading), the cross
entropy of the logits is computed again, a few tokens at a time.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_IGNORED_LABEL = -100

_CHUNK_ELEMENTS = 2**24
"""Largest number of logits whose cross entropy is computed at once: 64 MB in float32."""

_MAX_NODES = 64
"""Largest number of nodes of the autograd graph that are searched, from the loss on."""

_SELECTIONS = {"IndexBackward0", "IndexSelectBackward0", "MaskedSelectBackward0"}
"""Nodes of the autograd graph that select tokens, so that rows have unequal numbers of them."""


class _Targets(NamedTuple):
    losses: Tensor
    """Loss of each target, 0 where there is none, float32, shape ``(rows, targets per row)``."""

    counted: Tensor
    """Whether there is a target, of the same shape."""

    num_misplaced: Tensor | None = None
    """As in `RowLosses`."""


class RowLosses(NamedTuple):
    """Losses of the rows of a micro-batch, detached, float32."""

    sums: Tensor
    """Sum of the losses of the targets of each row, shape ``(rows,)``."""

    targets: Tensor
    """Number of the targets of each row, shape ``(rows,)``."""

    num_lost: Tensor | None = None
    """Number of targets that belong to none of the rows, shape ``()``; ``None`` for none."""

    num_misplaced: Tensor | None = None
    """Number of targets that are not the label at their place of the row, shape ``()``; ``None``
    for none. The losses belong to the rows only if it is 0."""


@torch.no_grad()
def row_losses(
    output: Any, inputs: Mapping[str, Any], num_rows: int, *, shifts_labels: bool
) -> RowLosses:
    """Return the loss of each row of a micro-batch. Does not synchronize with the device.

    Call it between the forward and the backward of the micro-batch.

    Args:
        output: Output of the network, which has ``logits``.
        inputs: Arguments of the call by name, with ``labels``. If all rows are in one sequence,
            ``position_ids`` tell where each of them begins.
        num_rows: Number of rows of the micro-batch.
        shifts_labels: Whether the network predicts the next token; see
            `mfwrap.step.per_token.shifts_labels`.

    Raises:
        ValueError: If the network gives no logits, its loss is not one of cross entropy, squared
            error and binary cross entropy, it has weights, or the rows cannot be told apart.
    """
    losses, counted, num_misplaced = _losses_of_targets(output, inputs, shifts_labels=shifts_labels)
    if len(losses) == num_rows:
        return RowLosses(losses.sum(dim=1), counted.sum(dim=1).float(), num_misplaced=num_misplaced)
    positions = inputs.get("position_ids")
    if len(losses) != 1 or not isinstance(positions, Tensor):
        msg = (
            f"`loss_by` and `row_losses` need micro-batches of as many rows as the data set gives, "
            f"or `position_ids` of texts in one row, got {len(losses)} instead of {num_rows} rows "
            f"and only {sorted(inputs)}"
        )
        raise ValueError(msg)
    # TRL's head gives no result for the last token, which predicts nothing.
    row = (positions.reshape(-1)[: losses.shape[1]] == 0).cumsum(dim=0) - 1
    # What is behind the last row is padding, which has no targets.
    row = row.clamp(min=0, max=num_rows)
    sums = losses.new_zeros(num_rows + 1).index_add(0, row, losses[0])
    targets = losses.new_zeros(num_rows + 1).index_add(0, row, counted[0].float())
    return RowLosses(sums[:-1], targets[:-1], targets[-1], num_misplaced)


def _losses_of_targets(output: Any, inputs: Mapping[str, Any], *, shifts_labels: bool) -> _Targets:
    log_probs, mask = _entry(output, "log_probs"), _entry(output, "label_mask")
    if isinstance(log_probs, Tensor) and isinstance(mask, Tensor):
        return _Targets(-log_probs.float(), mask)  # of TRL's fused head, which makes no logits
    logits, labels = _entry(output, "logits"), inputs.get("labels")
    for name, value in (("an output with `logits`", logits), ("`labels` in its inputs", labels)):
        if not isinstance(value, Tensor):
            msg = (
                f"`loss_by` and `row_losses` need a model that is called with `labels` and returns "
                f"`logits`; the model's call lacks {name}"
            )
            raise ValueError(msg)  # noqa: TRY004  (a value of the model)
    targets = inputs.get("shift_labels", labels)
    kept = _kept_by_loss(_entry(output, "loss"), logits, targets)
    if kept is not None:
        return kept
    if shifts_labels and targets is labels:
        targets = functional.pad(labels[..., 1:], (0, 1), value=_IGNORED_LABEL)
    if targets.is_floating_point() or targets.shape != logits.shape[:-1]:
        msg = (
            "`loss_by` and `row_losses` need a model whose loss is torch's cross entropy, squared "
            "error or binary cross entropy of all labels, or logits with one more dimension than "
            "the labels; got a loss of a part of the labels or of another kind, "
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(targets.shape)}"
        )
        raise ValueError(msg)
    counted = (targets != _IGNORED_LABEL).reshape(len(logits), -1)
    return _Targets(_cross_entropy(logits, targets).reshape(counted.shape), counted)


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each target, shape ``(targets,)``, float32."""
    size = max(_CHUNK_ELEMENTS // logits.shape[-1], 1)
    parts = zip(logits.flatten(0, -2).split(size), targets.flatten().split(size), strict=True)
    losses = [
        functional.cross_entropy(
            part.float(), of_part, ignore_index=_IGNORED_LABEL, reduction="none"
        )
        for part, of_part in parts
    ]
    return torch.cat(losses)


def _kept_by_loss(loss: Any, logits: Tensor, labels: Tensor) -> _Targets | None:
    """Return the losses of the targets from what a loss keeps for its backward.

    ``None`` if that is not the arguments of one of torch's losses, or if the loss is not that of
    all labels, so that its targets do not say to which row they belong.

    Raises:
        ValueError: If the loss has weights.
    """
    node, num_rows = _node_of_loss(loss), len(logits)
    if node is None or _selects(node, logits.grad_fn):
        return None
    # The backward is the only one that may call the hooks: some free the tensor, or copy it back.
    raw = node._raw_saved_self  # noqa: SLF001  (documented name)
    if getattr(raw, "unpack_hook", None) is not None:
        return None
    weights = (getattr(node, name, None) for name in ("_saved_weight", "_saved_pos_weight"))
    if any(weight is not None for weight in weights):
        msg = (
            "`loss_by` and `row_losses` need a model whose loss has no weights, got a loss with "
            "weights of classes or targets"
        )
        raise ValueError(msg)
    values, targets = node._saved_self, node._saved_target  # noqa: SLF001  (documented names)
    kind = node.name()
    if kind == "NllLossBackward0":
        counted = targets != _signed(node._saved_ignore_index)  # noqa: SLF001  (see above)
        picked = values.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        losses = torch.where(counted, -picked.float(), 0.0)
        return _in_rows(losses, counted, targets, labels, num_rows)
    if kind == "MseLossBackward0":
        losses = (values.float() - targets.float()).square()
        counted = torch.ones_like(losses, dtype=torch.bool)
    else:
        losses = functional.binary_cross_entropy_with_logits(
            values.float(), targets.float(), reduction="none"
        )
        counted = torch.ones_like(losses, dtype=torch.bool)
    # Rows are the first dimension, unless the tokens of all of them were put into one.
    if losses.shape[:1] != (num_rows,) and (
        losses.numel() != labels.numel() or losses.numel() % num_rows
    ):
        return None
    return _Targets(losses.reshape(num_rows, -1), counted.reshape(num_rows, -1))


def _in_rows(
    losses: Tensor, counted: Tensor, targets: Tensor, labels: Tensor, num_rows: int
) -> _Targets | None:
    """Return the cross entropies of all rows, which are in one dimension, by row.

    A model may shift the labels, cut the first one off, or put a prompt before them.

    Args:
        losses: Losses of the targets, shape ``(N,)``.
        counted: Whether a target counts, shape ``(N,)``.
        targets: The targets, shape ``(N,)``.
        labels: Labels that the model was called with.
        num_rows: Number of rows.

    Returns:
        The losses; ``None`` if their number says that they are not those of all labels.
    """
    if targets.numel() % num_rows or labels.numel() % num_rows:
        return None
    losses, counted, targets, labels = (
        each.reshape(num_rows, -1) for each in (losses, counted, targets, labels)
    )
    labels = labels.to(targets.device, non_blocking=True)
    num_before = targets.shape[1] - labels.shape[1]
    if num_before < -1:
        return None
    layouts = [labels[:, 1:]]
    if num_before >= 0:
        layouts = [labels, functional.pad(labels[:, 1:], (0, 1), value=_IGNORED_LABEL)]
    start = max(num_before, 0)
    differ = [((targets[:, start:] != each) & counted[:, start:]).sum() for each in layouts]
    return _Targets(losses, counted, torch.stack(differ).amin())


def _selects(node: Any, end: Any) -> bool:
    """Return whether tokens are selected between the node of the logits and that of their loss.

    Args:
        node: Node of the loss.
        end: Node of the logits that the model returns.
    """
    for _ in range(_MAX_NODES // 8):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None or node is end:
            break
        if node.name() in _SELECTIONS:
            return True
    return False


def _node_of_loss(loss: Any) -> Any:
    """Return the node of the autograd graph that has computed a loss; ``None`` if it is unknown."""
    pending = deque([loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn else [])
    for _ in range(_MAX_NODES):
        if not pending:
            break
        node = pending.popleft()
        if node.name() in {
            "NllLossBackward0",
            "MseLossBackward0",
            "BinaryCrossEntropyWithLogitsBackward0",
        }:
            return node
        pending += [following for following, _ in node.next_functions if following is not None]
    return None


def _signed(index: int) -> int:
    """Return an index that torch keeps as 64 bits without a sign."""
    return index - 2**64 if index >= 2**63 else index
