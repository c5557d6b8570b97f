"""A page that shows runs: one file, which opens without a network."""

import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from mfwrap.checkpoints.folders import whole_file
from mfwrap.records.run_record import Curve, RunRecord, read_run
from mfwrap.report.drawing import Panel
from mfwrap.report.panels import panels_of

__all__ = ["write_run_page"]

_PAGE = """<!doctype html>
<html lang="en" data-last-step="{last_step}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><button id="theme" type="button">Light or dark</button></header>
{summary}
{panels}
{anomalies}
<script>{plotly}</script>
<script id="panels" type="application/json">{data}</script>
<script>{program}</script>
</body>
</html>
"""

_UNKNOWN = "\N{EN DASH}"

_ANOMALY_COLUMNS = (
    ("kind", "What"),
    ("layer", "Layer"),
    ("where", "First in"),
    ("name", "Name"),
    ("ranks", "Rank"),
    ("micro_batch", "Micro-batch"),
    ("gradients", "Norm of the worst group"),
    ("skipped", "Update"),
)


def write_run_page(folders: Sequence[Path], page: Path) -> None:
    """Write a page with the curves, norms and anomalies of one run, or of several over each other.

    The page holds everything it needs, about 5 MB of it plotly. It follows the system's choice of
    light or dark until the button is used. Panels share their axis of steps.

    Args:
        folders: Of the runs, at least one.
        page: HTML file that is written.

    Raises:
        FileNotFoundError: If a folder holds nothing of a run.
        ValueError: If `folders` is empty, or a file in one is not what its name says.
    """
    if not folders:
        msg = "`folders` must hold at least one run, got none"
        raise ValueError(msg)
    runs = _told_apart([read_run(folder) for folder in folders])
    panels = panels_of(runs)
    text = _PAGE.format(
        title=html.escape(", ".join(run.name for run in runs)),
        last_step=max(run.last_step() for run in runs),
        style=_part("page.css"),
        summary=_summary(runs),
        panels="\n".join(_section(panel) for panel in panels),
        anomalies=_anomalies(runs),
        plotly=get_plotlyjs(),
        data=_data(panels),
        program=_part("page.js"),
    )
    with whole_file(page) as partial:
        partial.write_text(text, encoding="utf-8")


def _told_apart(runs: list[RunRecord]) -> list[RunRecord]:
    """Number runs whose folders have the same name."""
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    return runs


def _part(name: str) -> str:
    return resources.files("mfwrap.report").joinpath(name).read_text(encoding="utf-8")


def _data(panels: Sequence[Panel]) -> str:
    content = [
        {
            "name": panel.name,
            "has_steps": panel.has_steps,
            "figure": json.loads(_laid_out(panel).to_json()),
        }
        for panel in panels
    ]
    # Within a script element nothing may look like its end.
    return json.dumps(content).replace("</", "<\\/")


def _laid_out(panel: Panel) -> Any:
    figure = panel.figure
    figure.update_layout(
        template="none",
        margin={"l": 64, "r": 20, "t": 36, "b": 44},
        height=figure.layout.height or 340,
        hovermode="x unified"
        if panel.has_steps and figure.data[0].type == "scatter"
        else "closest",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    figure.update_yaxes(automargin=True)
    if panel.has_steps:
        figure.update_xaxes(title_text="step")
    return figure


def _section(panel: Panel) -> str:
    return (
        f'<section id="{panel.name}"><h2>{panel.title}</h2>'
        f'<p class="note">{panel.note}</p><div class="plot"></div></section>'
    )


def _summary(runs: Sequence[RunRecord]) -> str:
    """Return a table of the runs, a row each."""
    columns = ("Run", "Steps", "Loss", "Evaluation, best", "Averaged, best", "Skipped", "Anomalies")
    head = "".join(f'<th class="number">{column}</th>' for column in columns[1:])
    rows = "".join(
        f'<tr><td class="name">{html.escape(run.name)}</td>'
        + "".join(f'<td class="number">{cell}</td>' for cell in _figures(run))
        + "</tr>"
        for run in runs
    )
    return (
        '<h2>Summary</h2><div class="wide"><table id="summary"><thead><tr>'
        f"<th>{columns[0]}</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _figures(run: RunRecord) -> list[str]:
    finite = [value for value in _values(run, "loss") if math.isfinite(value)]
    skipped = _values(run, "skipped_updates")
    return [
        str(run.last_step()),
        _shown(finite[-1] if finite else None),
        _shown(min(_values(run, "eval_loss"), default=None)),
        _shown(min(_values(run, "ema_eval_loss"), default=None)),
        _shown(skipped[-1] if skipped else None),
        str(len(run.anomalies)),
    ]


def _values(run: RunRecord, name: str) -> list[float]:
    return run.curves.get(name, Curve()).values


def _shown(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.5g}"


def _anomalies(runs: Sequence[RunRecord]) -> str:
    """Return a table of what went wrong; each step leads to its place in the curves."""
    heads = "".join(f"<th>{title}</th>" for _, title in _ANOMALY_COLUMNS)
    rows = [
        f'<tr><td>{html.escape(run.name)}</td><td class="number">'
        f'<a href="#loss" data-step="{int(anomaly["step"])}">{int(anomaly["step"])}</a></td>'
        + "".join(f'<td class="name">{_told(key, anomaly)}</td>' for key, _ in _ANOMALY_COLUMNS)
        + "</tr>"
        for run in runs
        for anomaly in run.anomalies
    ]
    if not rows:
        return '<h2 id="anomalies">Anomalies</h2><p class="note">None was recorded.</p>'
    return (
        '<h2 id="anomalies">Anomalies</h2><p class="note">A step leads to its place in the curves.'
        '</p><div class="wide"><table><thead><tr><th>Run</th><th class="number">Step</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _told(key: str, anomaly: dict[str, Any]) -> str:
    value = anomaly.get(key)
    if value is None:
        return _UNKNOWN
    if key == "skipped":
        return "skipped" if value else "applied"
    if key == "ranks":
        return html.escape(", ".join(str(rank) for rank in value)) or _UNKNOWN
    if key == "gradients":
        worst = value[0] if value else None
        return html.escape(f"{worst['name']}: {_norm(worst['norm'])}") if worst else _UNKNOWN
    return html.escape(str(value).replace("_", " ") if key == "kind" else str(value))


def _norm(value: Any) -> str:
    return f"{float(value):.4g}"
