"""Run a script with and without mfwrap, each time in a process of its own."""

import multiprocessing
import shutil
from pathlib import Path

from support.scripts_table.launch import FACTS, launch
from support.scripts_table.outcomes import Outcome, outcome
from support.scripts_table.rows import Script

__all__ = ["run"]

_SECONDS = 600
"""Time after which a script is stopped."""
_STAND_INS = Path(__file__).with_name("stand_ins")

_FORKING = multiprocessing.get_context("forkserver")
# All processes are forked from one that has imported what most scripts import, but not mfwrap.
_FORKING.set_forkserver_preload(
    [
        "support.scripts_table.launch",
        "datasets",
        "peft",
        "sentence_transformers",
        "sklearn.model_selection",
        "transformers.trainer",
        "transformers.trainer_seq2seq",
        "transformers.models.bert.modeling_bert",
        "trl.trainer.dpo_trainer",
        "trl.trainer.grpo_trainer",
        "trl.trainer.sft_trainer",
    ]
)


def run(
    script: Script, source: Path, hub: Path, folder: Path, *, clips: bool, mfwrap: bool
) -> Outcome:
    """Run a script.

    Args:
        script: The script.
        source: Folder of its repository.
        hub: Folder with the models and data sets that it loads.
        folder: Folder for its runs.
        clips: Whether it clips gradients, if it does so by itself.
        mfwrap: Whether it trains with mfwrap.
    """
    folder = folder / f"{'mfwrap' if mfwrap else 'stock'}{'' if clips else '-unclipped'}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    original = source / script.path
    text = original.read_text(encoding="utf-8")
    file = folder / original.name
    file.write_text(script.text(text, clips=clips, mfwrap=mfwrap), encoding="utf-8")
    # Some scripts import modules that are beside them.
    search = (_STAND_INS, original.parent)
    for line in script.command_lines(text, clips=clips):
        (folder / FACTS).unlink(missing_ok=True)
        process = _FORKING.Process(target=launch, args=(folder, file, line, search, hub))
        process.start()
        process.join(_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if not (folder / FACTS).exists():
            break
    return outcome(folder)
