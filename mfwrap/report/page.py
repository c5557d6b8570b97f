"""Write the run page: one HTML file that shows one run or several, and works offline."""

import base64
import gzip
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import final

from mfwrap.checkpoints.whole import whole_file
from mfwrap.records.run_record import RunRecord, read_run
from mfwrap.report.about import about
from mfwrap.report.curves import COLORS
from mfwrap.report.drawing import Panel, color_of
from mfwrap.report.episodes import episode_table, headline
from mfwrap.report.model_samples import model_sample_tables
from mfwrap.report.own_files import WRITER
from mfwrap.report.panels import axes_of, has_averages, panels_of, spans_of

PLOTLY = "plotly-cartesian.min.js.gz"
"""plotly.js with its types of charts that have two axes, from the npm package
plotly.js-cartesian-dist-min; see ``plotly-cartesian.md``."""

_FILES = resources.files("mfwrap.report")

_PAGE = """<!doctype html>
<html lang="en"{watch}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{writer}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1>{live}<button id="theme" type="button">Light or dark</button></header>
{headline}
{about}
{episodes}
{samples}
<p id="old">The curves need a browser of 2023 or newer (it must know DecompressionStream).</p>
{switches}
{panels}
<script id="plotly" type="text/plain">{plotly}</script>
<script id="data" type="text/plain">{data}</script>
<script>{program}</script>
</body>
</html>
"""


def write_run_page(folders: Sequence[Path], page: Path, *, watch: int = 0) -> None:
    """Write a page with the episodes, curves and norms of one run, or of several runs compared.

    The page begins with what went wrong, why, where, in which samples, and what the run did. It
    says what each run was, in which settings the runs differ, and what the model has said about a
    few inputs. It is one file of about 1 MB that works offline, because it contains plotly.js. It
    shows what the ``*.jsonl`` files of the run folders, ``run.json``, ``rollbacks.json`` and
    ``trainer_state.json`` have, and of the episodes the first 200.

    A browser draws the curves when it opens the page. For a screenshot, wait for the attribute
    ``data-ready`` of the first element.

    Args:
        folders: Run folders, at least one.
        page: HTML file to write or replace.
        watch: Seconds after which a browser loads the page again; 0 for never.

    Raises:
        FileNotFoundError: If a folder is not a run folder.
        ValueError: If `folders` is empty, or a file in a run folder cannot be read.
    """
    text = page_text(folders, watch=watch)
    with whole_file(page, must_be_listed=False) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def page_text(folders: Sequence[Path], *, watch: int = 0) -> str:
    """Return the page of `write_run_page` as text.

    Raises:
        FileNotFoundError: If a folder is not a run folder.
        ValueError: If `folders` is empty, or a file in a run folder cannot be read.
    """
    if not folders:
        msg = "`folders` must contain at least one run folder, got none"
        raise ValueError(msg)
    runs = _with_distinct_names([read_run(folder) for folder in folders])
    panels = panels_of(runs)
    live = f'<p class="live">Loaded again every {watch} seconds.</p>'
    return _PAGE.format(
        writer=WRITER,
        title=html.escape(", ".join(run.name for run in runs)),
        watch=f' data-watch="{watch}"' * bool(watch),
        live=live * bool(watch),
        style=(_FILES / "page.css").read_text(encoding="utf-8"),
        headline=headline(runs),
        about=about(runs),
        episodes=episode_table(runs),
        samples=model_sample_tables(runs),
        switches=_switches(runs, panels),
        panels="\n".join(_section(panel) for panel in panels),
        plotly=base64.b64encode((_FILES / PLOTLY).read_bytes()).decode("ascii"),
        data=_data(runs, panels),
        program=(_FILES / "page.js").read_text(encoding="utf-8"),
    )


@final
class RunPage:
    """The page of one run, or of several runs compared, for a notebook.

    The last line of a cell shows it: ``RunPage("runs/causal_lm")``. The page is of the moment at
    which it is shown.

    Args:
        folders: Run folders, at least one.
    """

    def __init__(self, *folders: str | Path) -> None:
        self.folders = [Path(folder) for folder in folders]

    def write(self, page: Path) -> None:
        """Write the page to an HTML file; see `write_run_page`."""
        write_run_page(self.folders, page)

    def _repr_html_(self) -> str:
        """Return the page within a frame, so that its styles and the notebook's stay apart."""
        text = html.escape(page_text(self.folders), quote=True)
        return (
            f'<iframe srcdoc="{text}" title="run page" '
            'style="width: 100%; height: 800px; border: 0"></iframe>'
        )


def _with_distinct_names(runs: list[RunRecord]) -> list[RunRecord]:
    """Append a number to each name that several runs share."""
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    return runs


def _data(runs: Sequence[RunRecord], panels: Sequence[Panel]) -> str:
    """Return what the page's program draws, as compressed JSON in base 64."""
    content = {
        "runs": [
            {
                "name": run.name,
                "color": color_of(number),
                "axes": axes_of(run),
                "first": run.first_step(),
                "last": run.last_step(),
            }
            for number, run in enumerate(runs)
        ],
        "panels": [{"name": p.name, "title": p.title, **p.content} for p in panels],
        "spans": spans_of(runs),
        "colors": COLORS,
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # Without a time stamp: the same run gives the same page.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _switches(runs: Sequence[RunRecord], panels: Sequence[Panel]) -> str:
    """Return what chooses the runs, the horizontal axis, the smoothing, and the weights."""
    buttons = [
        f'<button class="run" type="button" style="--color: {color_of(number)}">'
        f"{html.escape(run.name)}</button>"
        for number, run in enumerate(runs)
    ]
    selects = {"x": "by", "smoothing": "smoothing"}
    if has_averages(panels):
        selects["weights"] = "weights"
    shown = [
        f'<label>{words} <select name="{name}"></select></label>' for name, words in selects.items()
    ]
    whole = '<button id="whole" type="button" class="gap">Whole run</button>'
    return f'<div class="switches">{"".join(buttons * (len(runs) > 1) + shown)}{whole}</div>'


def _section(panel: Panel) -> str:
    return (
        f'<section id="{panel.name}"><div class="titled"><h2>{html.escape(panel.title)}</h2>'
        '<span class="unit"></span><span class="menu"></span></div>'
        f'<p class="note">{panel.note}</p><div class="legend"></div><div class="plot"></div>'
        "</section>"
    )
