"""One training step runs code in few files, so that a reader can follow it."""

import logging

import pytest

from support.entered_files import LOOPS


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_enters_few_files(loop, tmp_path, monkeypatch, request):
    """One step runs code in at most as many files of mfwrap as LOOPS allows for this loop."""
    monkeypatch.chdir(tmp_path)
    train, most = LOOPS[loop]

    # A test before this one may have given a monitor's own logger a level.
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    logging.disable(logging.WARNING)
    assert len(train()) <= most
