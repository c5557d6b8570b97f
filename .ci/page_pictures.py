"""Take the pictures of run pages that the README and the docs show, and draw one of a run.

python .ci/page_pictures.py    # as `make pictures` does; needs chromium, and no network

- docs/run_page.png is the page of the recipe causal_lm, shortened, with a planted NaN: in step 71,
  the MLP of the third layer returns NaN for one row of the second micro-batch, and again whenever
  it gets this row. docs/causal_lm.png is what `mfwrap plot` draws of the same run.
- docs/pictures/tutorial_*.png are the pages of the two runs of the tutorial.
- docs/pictures/sample_monitor.png is the table of samples of the recipe supervised_tuning.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from mfwrap.cli import main as command_line

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BAD_CALL = 2 * 70 + 1
"""Number of the bad call of the layer: each step has two micro-batches."""

LAYER, ROW = 2, 3
WIDTH = 1100
EPISODES = "#anomalies, #anomalies + .note, .wide:has(#episodes)"
"""Table of episodes, which repeats in full what the page has in short at its top."""

SHORTENED = ("h2:has(+ .wide #summary)", ".wide:has(#summary)", "#global_norm")
"""What is not on the picture of the README, so that it fits on a screen."""


class Fault:
    """Return NaN from one layer for one row, see above."""

    def __init__(self) -> None:
        self.layers: list[nn.Module] = []
        self.num_calls = 0
        self.row: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        """Spoil an output."""
        if not isinstance(module, LlamaMLP) or not module.training:
            return None
        if module not in self.layers:
            self.layers.append(module)
        if self.layers.index(module) != LAYER:
            return None
        if self.num_calls == BAD_CALL:
            self.row = inputs[0][ROW].detach().clone()
        self.num_calls += 1
        if self.row is None:
            return None
        is_bad = (inputs[0].detach() == self.row).all(dim=2).all(dim=1)
        return torch.where(is_bad[:, None, None], torch.nan, output)


def train() -> None:
    """Train in the current folder."""
    nn.modules.module.register_module_forward_hook(Fault())
    sys.argv = ["mfwrap", "train", "causal_lm"]
    command_line()


def take(browser: Any, run: Path, picture: Path, last: str, left_out: Sequence[str] = ()) -> None:
    """Take a picture of the page of a run, from its top to a panel.

    Args:
        browser: Browser of playwright.
        run: Run folder with run.html.
        picture: PNG file to write.
        last: Id of the last panel on the picture.
        left_out: Selectors of what is not on the picture, although it is on the page.
    """
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=1.5)
    page.goto((run / "run.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    hidden = ", ".join(["details", *left_out])
    page.add_style_tag(content=f"{hidden} {{ display: none; }}")
    box = page.locator(f"#{last}").bounding_box() or {}
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 8}
    page.screenshot(path=picture, full_page=True, clip=clip)
    page.close()


def take_samples(browser: Any, run: Path, picture: Path) -> None:
    """Take a picture of the table of what the model says."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=1.5)
    page.goto((run / "run.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    page.locator("table.said").screenshot(path=picture)
    page.close()


def main() -> None:
    """Train in a temporary folder, write the pages, and take the pictures."""
    if sys.argv[1:] == ["--train"]:
        train()
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from support.browser import open_browser
    from support.tutorial import RUN, find_the_nan

    program = ["-m", "mfwrap"]
    with tempfile.TemporaryDirectory() as temporary, open_browser() as browser:
        folder = Path(temporary)
        for words in (
            [__file__, "--train"],
            [*program, "report", "runs/causal_lm"],
            [*program, "plot", "runs/causal_lm", "--output", str(DOCS / "causal_lm.png")],
            [*program, "train", "image_classification"],
            [*program, "report", "runs/image_classification"],
            [*program, "train", "supervised_tuning"],
            [*program, "report", "runs/supervised_tuning"],
        ):
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-P", *words], cwd=folder, env=environment, check=True)
        find_the_nan(folder)
        runs, pictures = folder / "runs", DOCS / "pictures"
        others = (EPISODES, "#learning_rate", "#loss_scale")
        last = "local-norms"
        take(browser, runs / "causal_lm", DOCS / "run_page.png", "loss", (*others, *SHORTENED))
        take(browser, runs / "image_classification", pictures / "tutorial_run.png", last, others)
        take_samples(browser, runs / "supervised_tuning", pictures / "sample_monitor.png")
        take(browser, folder / RUN, pictures / "tutorial_nan.png", "loss", others)


if __name__ == "__main__":
    main()
