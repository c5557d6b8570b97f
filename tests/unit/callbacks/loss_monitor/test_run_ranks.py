"""The loss monitor on several ranks: printed records, means over ranks, and messages."""

import re

import pytest

from support.ranks.monitors import losses_shown, named_losses_shown, train_monitored

NAN = float("nan")
LOSSES = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3.0, 2.0, 5.0, 0.0, 9.0, 7.0]]
MEANS = [2.0, 2.0, 4.0, 2.0, 7.0, 6.5]


def shown(records):
    """Return the loss and the mean of each record."""
    found = [re.search(r"loss:\[ *([^/]+)/ *([^\]]+)\]", record) for record in records]
    return [tuple(map(float, match.groups())) for match in found]


@pytest.mark.slow
def test_the_main_process_prints_means_over_ranks(two_ranks):
    """Only the main process prints, and its losses and means are means over ranks."""
    first, second = two_ranks.run(losses_shown, LOSSES, [], [], {})

    assert shown(first["records"]) == [
        (2.0, 2.0),
        (2.0, 2.0),
        (4.0, 2.667),
        (2.0, 2.0),
        (7.0, 4.5),
        (6.5, 5.167),
    ]
    assert second["records"] == []
    assert first["sent"] == second["sent"] == [[2]] * 6


@pytest.mark.slow
def test_messages_are_sent_at_logging_steps_only(two_ranks):
    """At a logging step the ranks exchange two numbers for each step since the last message."""
    settings = {"per_print_times": 4}
    first, second = two_ranks.run(losses_shown, LOSSES, [], [5], settings)

    assert first["sent"] == second["sent"] == [[], [], [], [8], [2], []]
    assert shown(first["records"]) == [(2.0, 2.0)]
    # The ranks exchange no message after step 6, so for this step the total has only the main
    # process's loss.
    assert first["mean"]["total"] == pytest.approx(MEANS[3] + MEANS[4] + LOSSES[0][5])
    assert first["mean"]["num_losses"] == 3


def test_a_rank_without_targets_is_left_out(two_ranks):
    """A nan loss of a rank without targets is left out, but a nan loss of an overflow is shown."""
    losses = [[1.0, 2.0, NAN, NAN], [3.0, NAN, NAN, 1.0]]
    first, _ = two_ranks.run(losses_shown, losses, [4], [], {})

    assert [loss for loss, _ in shown(first["records"])] == pytest.approx(
        [2.0, 2.0, NAN, NAN], nan_ok=True
    )
    assert first["not finite"] == 2


def test_named_losses_are_means_over_ranks(two_ranks):
    """Named losses are averaged like their sum, over the ranks that have them."""
    losses = [[(1.0, 4.0), (2.0, 2.0), (3.0, 0.0)], [(3.0, 2.0), (4.0, 0.0), (5.0, 2.0)]]

    first, second = two_ranks.run(named_losses_shown, losses)

    assert second == []
    assert [loss for loss, _ in shown(first)] == [5.0, 4.0, 5.0]
    assert [re.findall(r"(\w+_loss): ([\d.]+)", record) for record in first] == [
        [("lm_loss", "2.000000"), ("mtp_loss", "3.000000")],
        [("lm_loss", "3.000000"), ("mtp_loss", "2.000000")],
        [("lm_loss", "4.000000")],
    ]


def test_of_one_rank_without_a_message(two_ranks):
    """With `loss_over_ranks=False`, no message is sent and the main process shows its own loss."""
    first, second = two_ranks.run(losses_shown, LOSSES, [], [], {"loss_over_ranks": False})

    assert [loss for loss, _ in shown(first["records"])] == LOSSES[0]
    assert first["sent"] == second["sent"] == [[]] * 6
    assert second["records"] == []


def test_one_process_sends_nothing():
    """A single process sends no message."""
    alone = losses_shown(0, LOSSES, [], [], {})

    assert [loss for loss, _ in shown(alone["records"])] == LOSSES[0]
    assert alone["sent"] == [[]] * 6


@pytest.mark.parametrize("kind", ["MFTrainer", "Trainer"])
def test_in_the_trainer(two_ranks, tmp_path, kind):
    """The printed losses equal those that the Trainer averages and logs."""
    first, second = two_ranks.run(train_monitored, str(tmp_path), kind, {"per_print_times": 1})
    logged = (tmp_path / "logged_0.txt").read_text(encoding="utf-8").split()

    assert second == []
    assert [loss for loss, _ in shown(first)] == pytest.approx(list(map(float, logged)), abs=2e-3)
    assert len(first) == 6
