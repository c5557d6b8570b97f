"""Add to the card that a Trainer writes how MindFormers' step has trained the model."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from mfwrap.checkpoints.whole import whole_file
from mfwrap.preflight import version_facts
from mfwrap.records.evaluations import ends_with_averages, last_has_averages
from mfwrap.records.secret_keys import without_secrets
from mfwrap.trainer.view import TrainerView


@contextmanager
def extended_card(trainer: TrainerView) -> Iterator[None]:
    """Add a tag and a section to the card that a Trainer writes within the block.

    The rest of the card stays as it is. A card that was there before, and that the block has not
    written again, is not changed.

    Args:
        trainer: The trainer, whose main process writes the card to its ``output_dir``.
    """
    held: Any = trainer
    file = Path(held.args.output_dir) / "README.md"
    before = _bytes(file)
    yield
    if not held.is_world_process_zero() or _bytes(file) == before:
        return
    card = ModelCard.load(file, ignore_metadata_errors=True)
    card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), "mfwrap"]))
    card.text = f"{card.text.rstrip()}\n\n## Training with mfwrap\n\n{_section(held)}\n"
    with whole_file(file) as partial:
        card.save(partial)


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _section(trainer: Any) -> str:
    config = trainer.attached.config
    settings = [
        f"- {one.name}: {without_secrets(getattr(config, one.name))}"
        for one in dataclasses.fields(config)
        if getattr(config, one.name) != one.default
    ]
    settings += [f"- {name}: {value}" for name, value in trainer.batch_growth.settings().items()]
    said = (
        f"`{type(trainer).__name__}` made {trainer.state.global_step} updates with MindFormers' "
        f"training step in mfwrap {version_facts()['mfwrap']}."
    )
    if trainer.attached.ema is not None:
        said += " It kept an average of the weights."
    if last_has_averages(trainer.state.log_history) and not ends_with_averages(trainer.state):
        said += " The last results are those of averaged weights, which this model does not have."
    if settings:
        said += "\n\nSettings of the step that differ from their defaults:\n\n"
    return said + "\n".join(settings)
