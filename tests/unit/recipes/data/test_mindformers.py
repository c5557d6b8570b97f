"""The data of an imported MindFormers file are named, and cannot be read."""

import pytest

from mfwrap.recipes.data.mindformers import MindFormersSource


def test_the_data_cannot_be_read():
    """The message names the loader and the file, and says what to do."""
    source = MindFormersSource(loader="MindDataset", path="/data/wiki.mindrecord")

    assert source.why_unread == "mfwrap does not read the data of MindFormers' MindDataset"
    with pytest.raises(ValueError, match=r"`type` .* MindDataset \(/data/wiki.mindrecord\)"):
        source.rows()
