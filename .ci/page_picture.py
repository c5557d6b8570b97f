"""Train the recipe causal_lm with a planted NaN, and take the picture of its page for the README.

python .ci/page_picture.py    # as `make pictures` does; needs chromium, and no network

In step 71, the MLP of the third layer returns NaN for one row of the second micro-batch, and again
whenever it gets this row.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from mfwrap.cli import main as command_line

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "run_page.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BAD_CALL = 2 * 70 + 1
"""Number of the bad call of the layer: each step has two micro-batches."""

LAYER, ROW = 2, 3
LEFT_OUT = ("learning_rate", "loss_scale")
"""Panels that the picture leaves out, so that the map is on it."""

WIDTH, LAST_PANEL = 1100, "local-norms"


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


def main() -> None:
    """Train in a temporary folder, write the page, and take the picture."""
    if sys.argv[1:] == ["--train"]:
        train()
        return
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory() as folder:
        for words in ([__file__, "--train"], ["-m", "mfwrap", "report", "runs/causal_lm"]):
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-P", *words], cwd=folder, env=environment, check=True)
        with sync_playwright() as driver:
            started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = started.new_page(
                viewport={"width": WIDTH, "height": 900}, device_scale_factor=1.5
            )
            page.goto((Path(folder) / "runs/causal_lm/run.html").as_uri())
            page.wait_for_selector("html[data-ready=true]")
            hidden = ", ".join(f"#{name}" for name in LEFT_OUT)
            page.add_style_tag(content=f"{hidden}, details {{ display: none; }}")
            box = page.locator(f"#{LAST_PANEL}").bounding_box() or {}
            height = box["y"] + box["height"] + 8
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
            page.screenshot(path=PICTURE, full_page=True, clip=clip)
            started.close()


if __name__ == "__main__":
    main()
