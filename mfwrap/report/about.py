"""Say what each run of a page was: its result, settings, versions, machine, and time."""

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from mfwrap.records.evaluations import AVERAGED
from mfwrap.records.rewards import REWARD
from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.records.settings import flattened
from mfwrap.report.curves import NUMBER

_UNKNOWN = "\N{EN DASH}"
_SECONDS = (("day", 86400), ("h", 3600), ("min", 60))
_PLACES = ("output_dir", "run_name", "logging_dir")
"""Settings that differ between any two runs, and say nothing about them."""


def about(runs: Sequence[RunRecord]) -> str:
    """Return a table with a row for each run, what differs between them, and all of their settings.

    Args:
        runs: At least one run. Without ``run.json``, only the results of a run are known.
    """
    return "".join([_summary(runs), _differences(runs), *(_details(run, runs) for run in runs)])


def breakable(name: str) -> str:
    """Return a name as HTML in which a line may break after a dot, an underscore or a slash."""
    return re.sub(r"([._/]+)", r"\1<wbr>", html.escape(name))


def _summary(runs: Sequence[RunRecord]) -> str:
    rows = [_figures(run) for run in runs]
    columns = [name for name in rows[0] if any(row[name] != _UNKNOWN for row in rows)]
    head = "".join(f'<th class="number">{column}</th>' for column in columns)
    body = "".join(
        f'<tr><td class="name" data-column="Run">{breakable(run.name)}</td>'
        + "".join(f'<td class="number" data-column="{name}">{row[name]}</td>' for name in columns)
        + "</tr>"
        for run, row in zip(runs, rows, strict=True)
    )
    return (
        '<h2>Summary</h2><div class="wide"><table id="summary" class="rows"><thead><tr>'
        f"<th>Run</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figures(run: RunRecord) -> dict[str, str]:
    # Some runs record the number of skipped updates so far, others a flag for each step.
    counts, flags = _finite(run, "skipped_updates"), _finite(run, "skipped")
    skipped = counts[-1:] or ([sum(flags)] if flags else [])
    facts = run.facts
    parameters, hardware = facts.get("parameters") or {}, facts.get("hardware") or {}
    return {
        "Steps": str(run.last_step()),
        "Last reward": _shown(_last(run, REWARD)),
        "Last loss": _shown(_last(run, "loss")),
        **_best(run, "Best eval_reward", "Best evaluation"),
        **_best(run, "Best eval_reward, averaged weights", "Best with averaged weights", AVERAGED),
        "Skipped updates": _shown(skipped[0] if skipped else None),
        "Episodes": str(len(run.episodes)),
        "Resumed at": ", ".join(map(str, facts.get("resumed") or ())) or _UNKNOWN,
        "Ended": html.escape(str(facts.get("state") or _UNKNOWN)),
        "Time": duration(facts.get("seconds")),
        "Parameters": _in_short(parameters.get("total")),
        "Hardware": html.escape(str(hardware.get("name") or _UNKNOWN)),
    }


def _best(run: RunRecord, of_reward: str, of_loss: str, prefix: str = "") -> dict[str, str]:
    """Return the best evaluation of a run under one of two names.

    Args:
        run: The run.
        of_reward: Name of the highest reward.
        of_loss: Name of the lowest loss, which says little if there are rewards.
        prefix: Beginning of the names of the metrics.
    """
    rewards = _finite(run, f"{prefix}eval_{REWARD}")
    losses = [] if rewards else _finite(run, f"{prefix}eval_loss")
    return {
        of_reward: _shown(max(rewards, default=None)),
        of_loss: _shown(min(losses, default=None)),
    }


def _last(run: RunRecord, name: str) -> float | None:
    values = run.curves.get(name, Curve()).values
    return values[-1] if values else None


def _finite(run: RunRecord, name: str) -> list[float]:
    return [value for value in run.curves.get(name, Curve()).values if math.isfinite(value)]


def _shown(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:{NUMBER}}"


def duration(seconds: Any) -> str:
    """Return a time in words, such as ``3 min 20 s``; a dash if it is unknown."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return _UNKNOWN
    for place, (unit, size) in enumerate(_SECONDS):
        if seconds >= size:
            whole, rest = divmod(round(seconds), size)
            smaller, least = (*_SECONDS, ("s", 1))[place + 1]
            return f"{whole} {unit} {rest // least} {smaller}"
    return f"{seconds:.3g} s"


def _in_short(number: Any) -> str:
    """Return a count with a unit, such as ``1.24 M``."""
    if not isinstance(number, (int, float)):
        return _UNKNOWN
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _differences(runs: Sequence[RunRecord]) -> str:
    """Return a table of the settings in which runs differ; nothing for one run."""
    known = [run for run in runs if run.facts]
    settings = [{**_settings(run), **_command(run)} for run in known]
    if len(known) < 2:
        return ""
    names = [
        name
        for name in dict.fromkeys(name for each in settings for name in each)
        if not name.endswith(_PLACES)
    ]
    different = [name for name in names if len({each.get(name, _UNKNOWN) for each in settings}) > 1]
    if not different:
        return '<h2>Differences</h2><p class="note">All recorded settings are the same.</p>'
    head = "".join(f"<th>{breakable(run.name)}</th>" for run in known)
    rows = "".join(
        f'<tr><td class="name">{breakable(name)}</td>'
        + "".join(
            f'<td class="value" data-column="{html.escape(run.name)}">'
            f"{html.escape(each.get(name, _UNKNOWN))}</td>"
            for run, each in zip(known, settings, strict=True)
        )
        + "</tr>"
        for name in different
    )
    return (
        '<h2>Differences</h2><div class="wide"><table id="differences" class="rows"><thead><tr>'
        f"<th>Setting</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _command(run: RunRecord) -> dict[str, str]:
    """Return the command, whose own arguments may be the only ones that differ; without a folder.

    Two runs of a recipe differ in the folder in any case.
    """
    words = run.facts.get("command")
    if not isinstance(words, list):
        return {}
    others = (str(word) for word in words if re.split("[/=]", str(word))[-1] != run.name)
    return {"command": " ".join(others)}


def _settings(run: RunRecord) -> dict[str, str]:
    """Return the settings, the model, the machine and the versions of a run, by name."""
    facts = run.facts
    # A recipe has a setting `model`, too.
    told = {
        "class of the model": facts.get("model"),
        "parameters": facts.get("parameters"),
        "hardware": facts.get("hardware"),
        "versions": facts.get("versions"),
    }
    known = {name: fact for name, fact in told.items() if fact}
    return flattened({**(facts.get("configuration") or {}), **known})


def _details(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    """Return the command and all settings of a run, folded."""
    if not run.facts:
        return ""
    of = f" of {html.escape(run.name)}" if len(runs) > 1 else ""
    names = {"Command": "command", "Resumed with": "resume_command", "Started": "started"}
    facts = {term: run.facts.get(name) for term, name in names.items()}
    listed = "".join(
        f"<dt>{term}</dt><dd><code>{html.escape(str(fact))}</code></dd>"
        for term, fact in facts.items()
        if fact
    )
    for change in run.facts.get("changes") or ():
        settings = html.escape("; ".join(change["settings"]))
        listed += f"<dt>Changed at step {change['step']}</dt><dd>{settings}</dd>"
    rows = "".join(
        f'<tr><td class="name">{breakable(name)}</td>'
        f'<td class="value">{html.escape(value)}</td></tr>'
        for name, value in _settings(run).items()
    )
    return (
        f"<details><summary>Command, settings, versions and machine{of}</summary>"
        f'<dl class="facts">{listed}</dl>'
        f'<table class="rows"><tbody>{rows}</tbody></table></details>'
    )
