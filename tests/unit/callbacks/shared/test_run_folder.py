"""A callback finds its run folder."""

from pathlib import Path

import pytest
from transformers import TrainingArguments

from mfwrap.callbacks.shared.run_folder import required_run_folder, run_folder


def test_which_folder(tmp_path):
    """The callback's own folder comes before the trainer's; both may be missing."""
    args = TrainingArguments(str(tmp_path), use_cpu=True)

    assert run_folder("own", args) == required_run_folder("own", args, "Monitor") == Path("own")
    assert run_folder(None, args) == required_run_folder(None, args, "Monitor") == tmp_path
    assert run_folder(None, None) is None


def test_a_required_folder_is_missing():
    """The error names the callback and its argument."""
    with pytest.raises(ValueError, match=r"^Monitor needs `folder` in a loop without `args\."):
        required_run_folder(None, None, "Monitor")
