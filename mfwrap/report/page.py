"""Write the run page: one HTML file that shows one run or several, and works offline."""

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
from mfwrap.report.curves import NUMBER
from mfwrap.report.drawing import Panel
from mfwrap.report.episodes import episode_table, headline
from mfwrap.report.panels import panels_of

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
{headline}
{episodes}
{summary}
{panels}
<script>{plotly}</script>
<script id="panels" type="application/json">{data}</script>
<script>{program}</script>
</body>
</html>
"""

_UNKNOWN = "\N{EN DASH}"


def write_run_page(folders: Sequence[Path], page: Path) -> None:
    """Write a page with the episodes, curves and norms of one run, or of several runs compared.

    The page begins with what went wrong, why, where, in which samples, and what the run did.
    The page works offline, because it contains plotly (5 MB). It uses the system's light or dark
    colors until the reader clicks the button. When the reader zooms a panel whose x-axis is the
    step, all such panels zoom to the same steps.

    Args:
        folders: Run folders, at least one.
        page: HTML file to write or replace.

    Raises:
        FileNotFoundError: If a folder is not a run folder.
        ValueError: If `folders` is empty, or a file in a run folder cannot be read.
    """
    if not folders:
        msg = "`folders` must contain at least one run folder, got none"
        raise ValueError(msg)
    runs = _with_distinct_names([read_run(folder) for folder in folders])
    panels = panels_of(runs)
    text = _PAGE.format(
        title=html.escape(", ".join(run.name for run in runs)),
        last_step=max(run.last_step() for run in runs),
        style=_resource("page.css"),
        headline=headline(runs),
        episodes=episode_table(runs),
        summary=_summary(runs),
        panels="\n".join(_section(panel) for panel in panels),
        plotly=get_plotlyjs(),
        data=_data(panels),
        program=_resource("page.js"),
    )
    with whole_file(page) as partial:
        partial.write_text(text, encoding="utf-8")


def _with_distinct_names(runs: list[RunRecord]) -> list[RunRecord]:
    """Append a number to each name that several runs share."""
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    return runs


def _resource(name: str) -> str:
    return resources.files("mfwrap.report").joinpath(name).read_text(encoding="utf-8")


def _data(panels: Sequence[Panel]) -> str:
    content = [
        {
            "name": panel.name,
            "has_steps": panel.has_steps,
            "figure": json.loads(_with_layout(panel).to_json()),
        }
        for panel in panels
    ]
    # Escape "</", because "</script" in the text would end the script element.
    return json.dumps(content).replace("</", "<\\/")


def _with_layout(panel: Panel) -> Any:
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
    """Return a table with one row per run."""
    columns = (
        *("Run", "Steps", "Last loss", "Best evaluation", "Best with averaged weights"),
        *("Skipped updates", "Episodes"),
    )
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
    losses = run.curves.get("loss", Curve()).values
    # Some runs record the number of skipped updates so far, others a flag for each step.
    counts, flags = _finite(run, "skipped_updates"), _finite(run, "skipped")
    skipped = counts[-1:] or ([sum(flags)] if flags else [])
    return [
        str(run.last_step()),
        _shown(losses[-1] if losses else None),
        _shown(min(_finite(run, "eval_loss"), default=None)),
        _shown(min(_finite(run, "ema_eval_loss"), default=None)),
        _shown(skipped[0] if skipped else None),
        str(len(run.episodes)),
    ]


def _finite(run: RunRecord, name: str) -> list[float]:
    return [value for value in run.curves.get(name, Curve()).values if math.isfinite(value)]


def _shown(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:{NUMBER}}"
