"""Batches that do not fit into a pipeline's buffers are refused before anything is sent."""

from types import SimpleNamespace

import pytest
import torch

from mfwrap.step.pipeline_batches import PipelineBatches


def after_one_step(*, has_buffers):
    """Return the checks of a schedule that splits a batch of four rows in two, after one step."""
    schedule = SimpleNamespace(_n_microbatches=2, _args_chunk_spec=None, _kwargs_chunk_spec=None)
    batches = PipelineBatches(schedule, has_buffers=has_buffers)
    batches.check([torch.ones(4, 3)], {"mask": torch.ones(4, 3)}, torch.ones(4, 3))
    batches.keep_shapes()
    return batches


def test_one_rank_takes_batches_of_any_shape():
    """Without other ranks there are no buffers; the rows must still split evenly."""
    batches = after_one_step(has_buffers=False)
    batches.check([torch.ones(6, 5)], {}, torch.ones(6))

    with pytest.raises(ValueError, match="first dimension of `inputs` must be a multiple"):
        batches.check([torch.ones(5, 5)], {}, torch.ones(6))


def test_targets_and_keywords_may_change_their_length():
    """Ranks receive only what is computed from the inputs, which a rank may leave out."""
    longer = torch.ones(4, 5)
    batches = after_one_step(has_buffers=True)
    batches.check([], {"mask": longer}, longer)

    with pytest.raises(ValueError, match="`inputs` of shape"):
        batches.check([longer], {"mask": longer}, longer)


@pytest.mark.parametrize(
    ("inputs", "keywords", "target", "message"),
    [
        ([torch.ones(4, 5)], {}, None, r"`inputs` of shape \(4, 5\) after shape \(4, 3\) in"),
        ([], {"mask": torch.ones(2, 3)}, None, "`keywords` of 2 rows after 4 rows in the first"),
        ([], {}, torch.ones(2, 3), "`target` of 2 rows after 4 rows in the first step"),
        ([], {}, torch.ones(3, 3), "first dimension of `target` must be a multiple"),
    ],
)
def test_other_batches_are_refused(inputs, keywords, target, message):
    """Each argument that a rank was given is compared with that of the first batch."""
    batches = after_one_step(has_buffers=True)

    with pytest.raises(ValueError, match=message):
        batches.check(inputs, keywords, target)
