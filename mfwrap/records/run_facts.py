"""Say in ``run.json`` what a run was: command, settings, versions, machine, model and time."""

import datetime as dt
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn

from mfwrap.checkpoints.whole import whole_file
from mfwrap.collectives import num_ranks
from mfwrap.preflight import version_facts
from mfwrap.records.json_lines import last_value
from mfwrap.records.run_files import open_records, set_aside
from mfwrap.records.run_record import FACTS, NOT_ENDED, read_facts
from mfwrap.records.secret_keys import command_without_secrets, without_secrets
from mfwrap.records.settings import changed_settings

PROGRESS = "progress.jsonl"
_FORMAT_VERSION = 1

_TRACEBACK = "Traceback (most recent call last):"
_LONGEST_ERROR = 400
"""Number of characters that are written of the message of an error, and of each of its notes."""


@final
class RunFacts:
    """Write ``run.json`` and ``progress.jsonl`` in a run folder, in the main process.

    ``progress.jsonl`` has the seconds of training, and the tokens if they are known, at some steps.
    A training that resumes goes on counting from its checkpoint, keeps the command of the run's
    start beside its own, and notes which settings are others than before. Secrets are not written.

    Args:
        folder: Run folder.
        configuration: Settings of the run, nested by name.
        model: Network, whose parameters are counted; ``None`` if it is unknown.
        first_step: Steps finished before this training; 0 for a training from the start.
        max_steps: Steps of the whole run; ``None`` if unknown.
        code: ``folder``, relative to `folder`, and ``sha256``, the digests of files by the names of
            their modules: the user's own code that the run has imported; ``None`` for none.
        inputs: Hashes of a sample of the data and of the base model, by name.
        is_resume: Whether a training that does not begin at the start is a resume of the run, whose
            step is noted, and not a part of the same training.
        clock: Returns seconds from an arbitrary start.

    Raises:
        OSError: If files cannot be written to the folder.
    """

    def __init__(
        self,
        folder: Path,
        configuration: Mapping[str, Any],
        model: nn.Module | None = None,
        *,
        first_step: int = 0,
        max_steps: int | None = None,
        code: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] = MappingProxyType({}),
        is_resume: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder, self._clock, self._max_steps = folder, clock, max_steps
        self._lines = open_records(folder / PROGRESS, first_step)
        self._start = clock() - float(last_value(folder / PROGRESS, "seconds", float) or 0)
        # Not `first_step`: a checkpoint may be older than the record of its own step.
        self._last_step = last_value(folder / PROGRESS, "step", int) or 0
        former = read_facts(folder) if first_step else {}
        # A resume from an older checkpoint undoes those after it.
        resumed = [one for one in former.get("resumed") or [] if one <= first_step]
        if first_step and is_resume:
            resumed = sorted({*resumed, first_step})
        if not first_step:
            set_aside(folder / FACTS)
        lasting = lasting_facts(configuration, model)
        before = former.get("configuration") or {}
        changed = changed_settings(before, lasting["configuration"]) if before else []
        old, new = (_contents(one) for one in (former, {"code": code, "inputs": inputs}))
        changed += [f"content of {name}" for name in new if old.get(name, new[name]) != new[name]]
        # Settings that were changed after an older checkpoint are changed from there on now.
        changes = [
            {**one, "step": min(one["step"], first_step)} for one in former.get("changes") or []
        ]
        if changed:
            changes.append({"step": first_step, "settings": changed})
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        command = command_without_secrets(_command())
        first_command = former.get("command") or command
        self._facts = {
            "format_version": _FORMAT_VERSION,
            "command": first_command,
            **({"resume_command": command} if command != first_command else {}),
            "started": former.get("started") or now,
            **({"resumed": resumed} if resumed else {}),
            **({"changes": changes} if changes else {}),
            "hardware": hardware(),
            **lasting,
            **({} if code is None else {"code": code}),
            **({"inputs": dict(inputs)} if inputs else {}),
        }
        self._write(NOT_ENDED)

    def note(self, step: int, tokens: int | None = None) -> None:
        """Record the time, and the tokens of the run so far, at a step."""
        if step > self._last_step:
            self._last_step = step
            seconds = round(self._clock() - self._start, 3)
            self._lines.append(
                {"step": step, "seconds": seconds} | ({} if tokens is None else {"tokens": tokens})
            )

    def save(self) -> None:
        """Write how long the run has taken so far."""
        self._write(NOT_ENDED)

    def end(self, step: int, how: str = "ended") -> None:
        """Write that the training has ended after a step.

        Args:
            step: Number of the last step.
            how: What ended the training, if it is not its last step: ``"stopped by a signal"``.
        """
        self.note(step)
        is_whole = self._max_steps is None or step >= self._max_steps
        self._write("finished" if is_whole else f"{how} at step {step} of {self._max_steps}")

    def fail(self, error: Exception, step: int | None = None) -> None:
        """Write that the run has failed.

        Args:
            error: What has failed it; its class, its message and its notes are written.
            step: Last finished step; ``None`` after the end of the training.
        """
        when = "after its last step" if step is None else f"after step {step}"
        self._facts["error"] = _in_one_line(error)
        self._write(f"failed {when} ({type(error).__name__})")

    def _write(self, state: str) -> None:
        facts = self._facts | {"state": state, "seconds": round(self._clock() - self._start, 3)}
        _write_facts(self._folder, facts)


def fail_resume(folder: Path, error: Exception) -> None:
    """Write in the facts of a run that it could not continue; nothing for a new run."""
    facts = read_facts(folder)
    if facts:
        state = f"failed to continue ({type(error).__name__})"
        _write_facts(folder, facts | {"error": _in_one_line(error), "state": state})


def lasting_facts(configuration: Mapping[str, Any], model: nn.Module | None) -> dict[str, Any]:
    """Return what a run is, without secrets and without what differs when it is resumed.

    Args:
        configuration: Settings of the run, nested by name.
        model: Network, whose parameters are counted; ``None`` if it is unknown.
    """
    return {
        "model": None if model is None else type(model).__name__,
        "parameters": None if model is None else _parameters(model),
        "versions": version_facts(),
        "configuration": without_secrets(configuration),
    }


def _contents(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of code, data and base model in facts of a run, by name."""
    code = (facts.get("code") or {}).get("sha256") or {}
    return {f"{module}.py": one for module, one in code.items()} | (facts.get("inputs") or {})


def hardware() -> dict[str, Any]:
    """Return what a training runs on: a name in words, the type of the device, and the ranks."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    ranks = num_ranks()
    if kind is None:
        name = f"{_processor()}, {os.cpu_count()} cores"
        name = f"{ranks} processes on {name}" if ranks > 1 else name
    else:
        # Only CUDA and XPU tell the name of a device.
        module = getattr(torch, kind.type, None)
        named = getattr(module, "get_device_name", kind.type.upper)
        name = f"{ranks} x {named()}" if ranks > 1 else str(named())
    return {"name": name, "device": "cpu" if kind is None else kind.type, "ranks": ranks}


def _write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    with whole_file(folder / FACTS) as partial:
        partial.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    """Return the model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.processor() or platform.machine() or "CPU")


def _command() -> list[str]:
    """Return the words that started this process, with the program's name instead of its path."""
    words = list(sys.argv)
    # Python sets the specification of the main module only for `python -m`.
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return ["python", "-m", spec.name.removesuffix(".__main__"), *words[1:]]
    return [Path(words[0]).name, *words[1:]] if words else []


def _in_one_line(error: Exception) -> str:
    """Return class, message and notes of an error, without secrets and a traceback in it."""
    # Also for an error that cannot be turned into text.
    text = traceback.format_exception_only(error)[0]
    # A worker of a data loader sends its traceback as the message.
    message, mark, inner = text.strip().partition(_TRACEBACK)
    if mark:
        message = f"{message.rpartition(chr(10))[0]} {inner.splitlines()[-1]}"
    notes = [_short(str(note)) for note in getattr(error, "__notes__", ())]
    line, place = _short(message), _own_place(error)
    notes += [place] if place else []
    return "; ".join([line.removesuffix("."), *notes]) if notes else line


def _own_place(error: BaseException) -> str:
    """Return file and line of the user's code that has raised an error; empty if it is unknown."""
    folder, package = Path.cwd(), Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        is_installed = "site-packages" in file.parts or file.is_relative_to(package)
        if file.is_relative_to(folder) and not is_installed:
            return f"in {file.relative_to(folder)}:{frame.lineno}"
    return ""


def _short(text: str) -> str:
    """Return a text in one line, without secrets and not too long."""
    line = " ".join(str(without_secrets(text)).split())
    return line if len(line) <= _LONGEST_ERROR else f"{line[:_LONGEST_ERROR]}..."


def _parameters(model: nn.Module) -> dict[str, int]:
    """Count parameters; of a sharded model the whole ones."""
    sizes = [(math.prod(one.shape), one.requires_grad) for one in model.parameters()]
    return {"total": sum(n for n, _ in sizes), "trainable": sum(n for n, trains in sizes if trains)}
