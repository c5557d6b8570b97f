"""Windows whose series change, and are saved by name."""

import json

import torch

from mfwrap.callbacks.culprit.judges.windows import NamedWindow


def filled(names: list[str]) -> NamedWindow:
    """Return a window of a few values of each series."""
    window = NamedWindow()
    for step in range(6):
        values = torch.tensor([10.0 * len(name) + step for name in names])
        window.use(names, [1.0] * len(names), "cpu").add(values)
    return window


def test_series_keep_their_values_when_others_come_and_go():
    """A series is found by its name, in any place; a new one is empty."""
    window = filled(["a", "bb"])
    used = window.use(["ccc", "bb", "a"], [1.0, 1.0, 1.0], "cpu")

    expected = used.expected.tolist()
    assert used.expected.isnan().tolist() == [True, False, False]
    assert expected[1:] == [23.0, 13.0]


def test_the_same_names_are_the_same_window():
    """Nothing is made anew in a step in which nothing has changed."""
    window = filled(["a"])
    assert window.use(["a"], [1.0], "cpu") is window.use(["a"], [1.0], "cpu")


def test_a_state_goes_through_json():
    """A loaded window continues bitwise, also if it is saved before it is used."""
    one, two = filled(["a", "bb"]), NamedWindow()
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    three = NamedWindow()
    three.load_state_dict(json.loads(json.dumps(two.state_dict())))

    first, last = (each.use(["a", "bb"], [1.0, 1.0], "cpu") for each in (one, three))
    assert torch.equal(first.deviation, last.deviation)
    assert torch.equal(first.expected, last.expected)
