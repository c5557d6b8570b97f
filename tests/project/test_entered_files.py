"""A reader meets few files on the way of one training step."""

import logging

import pytest

from support.entered_files import LOOPS


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_enters_few_files(loop, tmp_path, monkeypatch, caplog):
    """One step enters at most as many files of mfwrap as its way to train allows."""
    monkeypatch.chdir(tmp_path)
    train, most = LOOPS[loop]

    with caplog.at_level(logging.ERROR, logger="mfwrap"):
        assert len(train()) <= most
