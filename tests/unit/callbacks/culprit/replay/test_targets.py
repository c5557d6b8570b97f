"""Targets are known by their name and type."""

import torch

from mfwrap.callbacks.culprit.replay.targets import is_target


def test_targets():
    """Class indices with a name of targets, at any depth of a batch."""
    labels = torch.tensor([[4, 5, -100], [-100, 6, 7]])
    assert is_target("batch.labels", labels)
    assert is_target("target", labels)
    assert not is_target("input_ids", labels)
    assert not is_target("labels", labels.float())
