"""Places in the program, and lists of ranks, are described in words."""

import sys

import pytest
import torch

from mfwrap.collectives.places import main_thread_place, named_ranks, place_of


def test_a_place_begins_with_the_innermost_frame():
    """The place names file, line and function, and the caller behind it."""

    def inner() -> str:
        return place_of(sys._getframe())

    first, second, *_ = inner().split(" < ")

    assert first.startswith("collectives/test_places.py:")
    assert first.endswith(" in inner")
    assert second.endswith(" in test_a_place_begins_with_the_innermost_frame")


def test_the_main_thread():
    """The main thread's place is the caller: frames of the package itself are left out."""
    assert main_thread_place().startswith("collectives/test_places.py:")


def test_frames_of_torch_are_left_out():
    """Of torch's frames, only the function that the program called is named."""
    found = []

    class Shown(torch.nn.Module):
        def forward(self) -> None:
            found.append(place_of(sys._getframe(1)))

    Shown()()

    assert found[0].startswith("_wrapped_call_impl called at collectives/test_places.py:")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0 and 2"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2, 3, 7], "ranks 0-3 and 7"),
        ([1, 3, 5], "ranks 1, 3 and 5"),
    ],
)
def test_ranks_in_words(ranks, words):
    """Ranks are listed in order; three or more in a row are a span."""
    assert named_ranks(ranks) == words
