"""The losses of rows are those of torch's losses, computed by hand in float64."""

import pytest
import torch
from torch.nn import functional
from transformers.loss.loss_utils import (
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from mfwrap.step import row_losses as module
from mfwrap.step.row_losses import row_losses
from support.host_reads import HostReads
from support.versions import needs

ROWS, LENGTH, CLASSES = 4, 7, 11
IGNORED = -100


class Config:
    """The configuration of a classifier."""

    problem_type = None
    num_labels = CLASSES


def logits_of(*shape):
    """Return logits that need a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def classes(*shape, ignores=True):
    """Return targets, of which some do not count, and none of the second row."""
    labels = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))
    if ignores:
        labels[0, :3] = labels[1] = IGNORED
    return labels


def entropies(logits, labels):
    """Return sum and number of the cross entropies of each row, in float64."""
    log_probs = logits.detach().double().log_softmax(-1)
    found = []
    for row, targets in enumerate(labels.reshape(ROWS, -1).tolist()):
        of_row = log_probs[row].reshape(-1, CLASSES)
        pairs = [(place, y) for place, y in enumerate(targets) if y != IGNORED]
        found.append((-sum(of_row[pair].item() for pair in pairs), len(pairs)))
    return found


def shifted(labels):
    """Return the labels as targets of the tokens before them."""
    return torch.cat([labels[:, 1:], torch.full((ROWS, 1), IGNORED)], dim=1)


def causal(num_items):
    """Return output, inputs and losses of a language model."""
    logits, labels = logits_of(ROWS, LENGTH, CLASSES), classes(ROWS, LENGTH)
    loss = ForCausalLMLoss(logits, labels, CLASSES, num_items_in_batch=num_items)
    return loss, logits, labels, entropies(logits, shifted(labels))


def masked():
    """Return output, inputs and losses of a masked language model."""
    logits, labels = logits_of(ROWS, LENGTH, CLASSES), classes(ROWS, LENGTH)
    return ForMaskedLMLoss(logits, labels, CLASSES), logits, labels, entropies(logits, labels)


def of_tokens():
    """Return output, inputs and losses of a classifier of tokens."""
    logits, labels = logits_of(ROWS, LENGTH, CLASSES), classes(ROWS, LENGTH)
    loss = ForTokenClassification(logits, labels, Config())
    return loss, logits, labels, entropies(logits, labels)


def of_rows():
    """Return output, inputs and losses of a classifier of rows."""
    logits, labels = logits_of(ROWS, CLASSES), classes(ROWS, ignores=False)
    loss = ForSequenceClassificationLoss(labels, logits, Config())
    return loss, logits, labels, entropies(logits, labels)


def regression():
    """Return output, inputs and losses of a regression with one number."""
    config = Config()
    config.num_labels = 1
    logits, labels = logits_of(ROWS, 1), torch.arange(4.0)
    loss = ForSequenceClassificationLoss(labels, logits, config)
    errors = (logits.detach().double().squeeze() - labels).square().tolist()
    return loss, logits, labels, [(error, 1) for error in errors]


def several_classes():
    """Return output, inputs and losses of a classifier with several classes per row."""
    logits, labels = logits_of(ROWS, CLASSES), classes(ROWS, CLASSES, ignores=False) % 2.0
    loss = ForSequenceClassificationLoss(labels, logits, Config())
    chances = logits.detach().double().sigmoid()
    each = -(labels * chances.log() + (1 - labels) * (1 - chances).log())
    return loss, logits, labels, [(total, CLASSES) for total in each.sum(1).tolist()]


KINDS = {
    "next token": lambda: causal(None),
    "next token, summed": lambda: causal(torch.tensor(37)),
    "masked": masked,
    "tokens": of_tokens,
    "rows": of_rows,
    "regression": regression,
    "several classes": several_classes,
}


def assert_losses(found, expected):
    """Fail unless the rows have these sums and numbers, and no graph."""
    assert found.num_lost is None
    assert not found.num_misplaced
    assert found.sums.tolist() == pytest.approx([total for total, _ in expected], rel=1e-5)
    assert found.targets.tolist() == [count for _, count in expected]
    assert not found.sums.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_losses_that_torch_has_kept(kind, monkeypatch):
    """The losses come from what the trained loss keeps: no second pass, and no host read."""
    monkeypatch.delattr(module, "_cross_entropy")
    loss, logits, labels, expected = KINDS[kind]()
    output = {"loss": loss * 3 + 0, "logits": logits}
    with HostReads() as reads:
        found = row_losses(output, {"labels": labels}, ROWS, shifts_labels=False)

    assert_losses(found, expected)
    assert reads.names == []
    loss.backward()


@pytest.mark.parametrize("chunk", [1, 3 * CLASSES, 2**20])
@pytest.mark.parametrize("kind", [*KINDS][:5])
def test_losses_computed_again(kind, chunk, monkeypatch):
    """Without a graph, the cross entropy of the logits is computed again, in parts of any size."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    loss, logits, labels, expected = KINDS[kind]()
    output = {"loss": loss.detach(), "logits": logits}
    found = row_losses(
        output, {"labels": labels}, ROWS, shifts_labels=kind.startswith("next token")
    )

    assert_losses(found, expected)


def test_labels_that_are_shifted_already():
    """`shift_labels` are the targets, in the place of `labels`."""
    _, logits, labels, expected = causal(None)
    inputs = {"labels": labels, "shift_labels": shifted(labels)}
    found = row_losses({"logits": logits}, inputs, ROWS, shifts_labels=True)

    assert_losses(found, expected)


def test_log_probs_of_a_fused_head():
    """TRL's head gives log-probabilities of the targets, and no logits."""
    _, logits, labels, expected = causal(None)
    mask = labels[:, 1:] != IGNORED
    picked = logits.log_softmax(-1)[:, :-1].gather(2, labels[:, 1:, None].clamp(min=0)).squeeze(2)
    output = {"log_probs": picked.masked_fill(~mask, 0), "label_mask": mask}
    found = row_losses(output, {"labels": labels}, ROWS, shifts_labels=True)

    assert_losses(found, expected)


@pytest.mark.parametrize("num_rows", [ROWS, ROWS - 1])
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_in_one_sequence(num_rows, padding):
    """Positions tell the rows apart; targets of further rows are counted as lost."""
    _, logits, labels, _ = masked()
    labels[:, 0] = IGNORED
    expected = entropies(logits, labels)
    flat = functional.pad(labels.reshape(-1), (0, padding), value=IGNORED)[None]
    positions = functional.pad(torch.arange(LENGTH).repeat(ROWS), (0, padding))[None]
    logits = functional.pad(logits.reshape(-1, CLASSES), (0, 0, 0, padding))[None]
    inputs = {"labels": flat, "position_ids": positions}
    found = row_losses({"logits": logits}, inputs, num_rows, shifts_labels=False)

    assert_losses(found._replace(num_lost=None), expected[:num_rows])
    assert found.num_lost == sum(count for _, count in expected[num_rows:])


@needs("torch", "2.13", "SavedTensor.unpack_hook")
@pytest.mark.parametrize("kind", [*KINDS][:5])
def test_tensors_that_are_unpacked_once(kind):
    """Hooks for saved tensors may free what they unpack, so only the backward unpacks it."""
    packed = []

    def unpack(at):
        value, packed[at] = packed[at], None
        assert value is not None, "unpacked twice"
        return value

    with torch.autograd.graph.saved_tensors_hooks(
        lambda v: packed.append(v) or len(packed) - 1, unpack
    ):
        loss, logits, labels, expected = KINDS[kind]()
    output, shifts = {"loss": loss, "logits": logits}, kind.startswith("next token")
    found = row_losses(output, {"labels": labels}, ROWS, shifts_labels=shifts)

    assert_losses(found, expected)
    loss.backward()


LENGTHS = [7, 5, 6, 6]
"""Tokens of each row: together as many as 4 rows of 6."""


def selected(names):
    """Return a masked model's output, and inputs; its loss has selected tokens by these names."""
    logits, labels = logits_of(ROWS, LENGTH, CLASSES), classes(ROWS, LENGTH)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    labels[~mask] = IGNORED
    flat = logits.flatten(0, 1)
    picked = {
        "index": lambda: logits[mask],
        "index_select": lambda: flat.index_select(0, mask.flatten().nonzero().squeeze(1)),
        "gather": lambda: flat.gather(0, mask.flatten().nonzero().expand(-1, CLASSES)),
    }[names]()
    output = {"loss": functional.cross_entropy(picked, labels[mask]), "logits": logits}
    return output, {"labels": labels}, entropies(logits, labels)


@pytest.mark.parametrize("names", ["index", "index_select"])
def test_a_loss_of_selected_tokens(names):
    """Its targets say nothing about their rows, so the losses are computed again."""
    output, inputs, expected = selected(names)

    assert_losses(row_losses(output, inputs, ROWS, shifts_labels=False), expected)


def test_targets_in_other_places():
    """A selection that goes unnoticed has other targets than the labels, which are counted."""
    output, inputs, _ = selected("gather")
    with HostReads() as reads:
        found = row_losses(output, inputs, ROWS, shifts_labels=False)

    assert found.num_misplaced.item() > 0
    assert reads.names == []


def test_another_number_of_targets():
    """Targets that divide by the rows are computed again if they are not those of all labels."""
    logits, labels = logits_of(ROWS, LENGTH, CLASSES), classes(ROWS, LENGTH)
    few = functional.cross_entropy(logits.flatten(0, 1)[:ROWS], labels.flatten()[:ROWS])
    found = row_losses(
        {"loss": few, "logits": logits}, {"labels": labels}, ROWS, shifts_labels=False
    )

    assert_losses(found, entropies(logits, labels))


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("is_cut", [True, False])
def test_labels_that_the_model_moves(num_before, is_cut, monkeypatch):
    """A model may cut off the first label or shift it, and put a prompt before the rows."""
    monkeypatch.delattr(module, "_cross_entropy")
    labels = classes(ROWS, LENGTH)
    logits = logits_of(ROWS, num_before + LENGTH, CLASSES)
    prompted = functional.pad(labels, (num_before, 0), value=IGNORED)
    targets = shifted(prompted)
    cut = slice(None, -1 if is_cut else None)
    loss = functional.cross_entropy(logits[:, cut].flatten(0, 1), targets[:, cut].flatten())
    output = {"loss": loss, "logits": logits}

    found = row_losses(output, {"labels": labels}, ROWS, shifts_labels=False)
    assert_losses(found, entropies(logits, targets))


def test_a_binary_loss_of_selected_tokens():
    """A token classifier that leaves padding out is refused: its losses cannot be computed."""
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    logits, labels = logits_of(ROWS, LENGTH), classes(ROWS, LENGTH, ignores=False) % 2
    picked = logits.flatten()[mask.flatten()]
    loss = functional.binary_cross_entropy_with_logits(picked, labels[mask].float())
    with pytest.raises(ValueError, match="got a loss of a part of the labels"):
        row_losses({"loss": loss, "logits": logits}, {"labels": labels}, ROWS, shifts_labels=False)


@pytest.mark.parametrize("kind", ["classes", "targets", "positive targets"])
def test_weights_are_refused(kind):
    """A weighted loss is not the mean of the losses of the rows, even if it is near it at first."""
    logits, labels, weights = (
        logits_of(ROWS, CLASSES),
        torch.ones(ROWS, CLASSES),
        torch.ones(CLASSES),
    )
    if kind == "classes":
        labels = classes(ROWS, ignores=False)
        loss = functional.cross_entropy(logits, labels, weight=weights)
    else:
        name = "weight" if kind == "targets" else "pos_weight"
        loss = functional.binary_cross_entropy_with_logits(logits, labels, **{name: weights})
    output = {"loss": loss, "logits": logits}
    with pytest.raises(ValueError, match="got a loss with weights of classes or targets"):
        row_losses(output, {"labels": labels}, ROWS, shifts_labels=False)


@pytest.mark.parametrize(
    ("output", "inputs", "num_rows", "says"),
    [
        ({"loss": torch.ones(())}, {"labels": classes(ROWS, 3)}, ROWS, "lacks an output with"),
        ({"logits": logits_of(ROWS, 3, CLASSES)}, {}, ROWS, "lacks `labels` in its inputs"),
        ({"logits": logits_of(ROWS)}, {"labels": torch.ones(ROWS)}, ROWS, r"logits of shape \(4,"),
        (
            {"logits": logits_of(ROWS, 3, CLASSES)},
            {"labels": classes(ROWS, 3)},
            3,
            "got 4 instead of 3 rows and only",
        ),
        (
            {"logits": logits_of(1, 3, CLASSES)},
            {"labels": classes(1, 3, ignores=False)},
            2,
            "got 1 instead of 2 rows and only",
        ),
    ],
)
def test_what_is_refused(output, inputs, num_rows, says):
    """One sentence says what is missing."""
    with pytest.raises(ValueError, match=says):
        row_losses(output, inputs, num_rows, shifts_labels=False)
