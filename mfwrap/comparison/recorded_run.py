"""Read what a run has recorded: numbers by file and rank, fingerprints, and settings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from mfwrap.records.fingerprints import (
    NAME,
    RankFingerprints,
    StepFingerprints,
    read_fingerprints,
)
from mfwrap.records.forms import to_number
from mfwrap.records.json_lines import rank_files, read_json_lines
from mfwrap.records.run_record import not_a_run_folder, read_facts, trainer_log
from mfwrap.runner.document import RECIPE_FILE, RecipeDocument, read_text

Numbers: TypeAlias = Mapping[int, Mapping[str, float]]
"""Numbers by step, then by name."""

TRAINER_LOG = "trainer_state"

SOURCES = (NAME, "training_state", "metrics", "local_norms", TRAINER_LOG)
"""Where numbers are recorded. A number is compared within one source only, because the Trainer's
log has means over several steps. The first source that both runs have counts."""

_ALIASES = {"grad_norm": "global_norm", "local_loss": "loss", "device_accum_local_loss": "loss"}
_SINGULAR = {"losses": "loss", "learning_rates": "learning_rate"}
_NO_SETTINGS = (
    *("output_dir", "logging_dir", "run_name", "tensorboard_dir", "folder"),
    *("resume_from_checkpoint", "report_to", "disable_tqdm"),
)
"""Last keys of settings that do not change the numbers of a run."""


@final
@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run has recorded in its folder."""

    folder: Path
    num_ranks: int
    """Number of ranks, as far as the records show."""

    facts: Mapping[str, Any]
    """Facts about the run that were recorded with its numbers: ``seed``, ``device``, ..."""

    recipe: Mapping[str, Any]
    """Values of ``recipe.yaml`` by dotted key; without that file, settings in ``run.json``."""

    numbers: Mapping[str, Mapping[int, Numbers]]
    """Numbers by source, then by rank."""

    fingerprints: Mapping[int, RankFingerprints]
    """Fingerprints by rank."""

    def fingerprints_of(self, step: int) -> dict[int, StepFingerprints]:
        """Return the fingerprints of a step by rank."""
        found = self.fingerprints.items()
        return {rank: each.steps[step] for rank, each in found if step in each.steps}

    @property
    def steps(self) -> set[int]:
        """Steps of which anything is recorded."""
        found = {step for ranks in self.numbers.values() for n in ranks.values() for step in n}
        return found | self.fingerprinted_steps

    @property
    def fingerprinted_steps(self) -> set[int]:
        """Steps of which any rank has fingerprints."""
        return {step for each in self.fingerprints.values() for step in each.steps}


def read_recorded_run(folder: Path) -> RecordedRun:
    """Read a run folder.

    Args:
        folder: Run folder.

    Raises:
        FileNotFoundError: If the folder does not exist or has no record of a step.
        ValueError: If a file is damaged.
    """
    numbers: dict[str, dict[int, Numbers]] = {}
    fingerprints: dict[int, RankFingerprints] = {}
    limits: dict[str, Any] = {}
    for path, source, rank in rank_files(folder):
        if source == NAME:
            found = read_fingerprints(read_json_lines(path), str(path))
            fingerprints[rank] = found
            numbers.setdefault(source, {})[rank] = {
                step: dict(_flat(each.numbers)) for step, each in found.steps.items()
            }
        elif source in SOURCES:
            records = read_json_lines(path)
            numbers.setdefault(source, {})[rank] = _by_step(records)
            for record in records:
                if "max_grad_norm" in record:
                    limits["max_grad_norm"] = record["max_grad_norm"]
    log = _by_step(trainer_log(folder))
    if log:
        numbers[TRAINER_LOG] = {0: log}
    facts = {**limits, **(fingerprints[0].run if 0 in fingerprints else {})}
    ranks = {rank for by_rank in numbers.values() for rank in by_rank} | fingerprints.keys()
    num_ranks = max(max(ranks, default=0) + 1, int(facts.get("num_ranks", 1)))
    run = RecordedRun(folder, num_ranks, facts, _recipe(folder), numbers, fingerprints)
    if not run.steps:
        raise not_a_run_folder(folder)
    return run


def _by_step(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the numbers of each step; if a step was recorded twice, the last record counts."""
    found: dict[int, dict[str, float]] = {}
    for record in records:
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and (new := dict(_flat(record))):
            found[step] = {**found.get(step, {}), **new}
    return found


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name == "step":
            continue
        if isinstance(value, Mapping):
            prefix = _SINGULAR.get(name, name)
            parts = [(f"{prefix}/{key}", to_number(item)) for key, item in value.items()]
        else:
            parts = [(_ALIASES.get(name, name), to_number(value))]
        yield from ((key, number) for key, number in parts if number is not None)


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / RECIPE_FILE
    if path.is_file():
        settings = RecipeDocument.parse(read_text(path), str(path)).data
    else:
        settings = read_facts(folder).get("configuration") or {}
    leaves = _leaves("", settings) if settings else ()
    return {key: value for key, value in leaves if key.rpartition(".")[2] not in _NO_SETTINGS}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, list)) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _leaves(f"{path}.{key}".lstrip("."), item)
    else:
        yield path, value
