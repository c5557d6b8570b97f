"""The arguments of a loop have what monitors read."""

import re
from pathlib import Path

import pytest

from mfwrap.callbacks.loop.arguments import LoopArguments, loop_arguments
from support.attached_runs import new_accelerator

ROOT = Path(__file__).parents[4]
# `CheckpointMonitor` needs a Trainer, and `EMACallback` reads it while an `MFTrainer` saves.
NEVER_IN_A_LOOP = {"device", "save_only_model"}


def test_monitors_find_what_they_read():
    """Each attribute of ``args`` that a monitor reads is there."""
    arguments = LoopArguments(
        output_dir="run",
        max_steps=3,
        gradient_accumulation_steps=2,
        process_index=1,
        fp16=False,
        bf16=True,
        seed=0,
    )
    read = set()
    for file in (ROOT / "callbacks").rglob("*.py"):
        if file.parent.name == "pynative":  # needs a Trainer; its callbacks' `args` are PyNative's
            continue
        read |= set(re.findall(r"(?<![\w_])args\.([a-z_0-9]+)", file.read_text(encoding="utf-8")))

    assert len(read) > 10
    assert {name for name in read - NEVER_IN_A_LOOP if not hasattr(arguments, name)} == set()
    assert not arguments.should_save


@pytest.mark.parametrize(("precision", "flags"), [("no", (False, False)), ("bf16", (False, True))])
def test_they_are_those_of_the_accelerator(precision, flags, tmp_path):
    """Accumulation and precision are the accelerator's; without one there is neither."""
    accelerator = new_accelerator(precision, gradient_accumulation_steps=3)

    found = loop_arguments(tmp_path, 7, accelerator)

    assert (found.gradient_accumulation_steps, found.fp16, found.bf16) == (3, *flags)
    assert (found.output_dir, found.max_steps, found.should_save) == (str(tmp_path), 7, True)
    assert loop_arguments(tmp_path, 7, None).gradient_accumulation_steps == 1
