"""Recipes in bfloat16 and float16: killed and resumed, bit by bit; and a planted NaN that is found.

Each recipe is run twice to its end, which shows whether the machine repeats itself, and once more
until it is killed after its first checkpoint and resumed. The trainings run beside each other.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainingArguments

from device import networks, ways
from device.environment import FOLDER
from device.recording import Recording, need
from device.setup import Setup
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.trainer import MFTrainer

RECIPES: dict[str, tuple[str, ...]] = {
    "causal_lm": (),
    "image_classification": (),
    "lora": ("trl", "peft"),
    "qlora": ("trl", "peft", "bitsandbytes"),
}
"""Names, and packages that only this recipe needs."""

SETTINGS = {"lora": ("callbacks.1.step_interval=10",)}
"""Settings of single recipes: without evaluations, a SampleMonitor needs an interval."""

BAD_ROW = 23
"""Row of the data set for which a module returns NaN."""

SECONDS = 300
"""After which a training is given up."""


class Case(NamedTuple):
    """A recipe in a precision."""

    recipe: str
    precision: str
    max_steps: int
    save_steps: int

    def command(self, folder: Path, *more: str) -> list[str]:
        """Return the command that trains into a folder."""
        settings = {
            "output_dir": folder,
            "max_steps": self.max_steps,
            "save_strategy": "steps",
            "save_steps": self.save_steps,
            "save_total_limit": "null",
            "eval_strategy": "'no'",
            "load_best_model_at_end": "false",
            "bf16": str(self.precision == "bf16").lower(),
            "fp16": str(self.precision == "fp16").lower(),
            "use_cpu": str(not torch.cuda.is_available()).lower(),
            # Without it, kernels may add in another order in another run.
            "full_determinism": "true",
        }
        command = [sys.executable, "-m", "mfwrap", "train", self.recipe, *more]
        for name, value in settings.items():
            command += ["--set", f"training.{name}={value}"]
        for setting in SETTINGS.get(self.recipe, ()):
            command += ["--set", setting]
        return command


def measure(recording: Recording, setup: Setup) -> None:
    """Plant the NaN first, since it needs no other package; then train the recipes."""
    with recording.part("a planted NaN"):
        _planted_nan(recording, setup)
    with recording.part("recipes"):
        need("pydantic", "click", "datasets", "yaml", "sklearn")
        _recipes(recording, setup)


def _recipes(recording: Recording, setup: Setup) -> None:
    steps = setup.size((60, 20), (6, 2))
    cases = []
    for recipe, packages in RECIPES.items():
        # The Trainer has no float16 on a CPU.
        for precision in ("bf16", "fp16") if setup.on_cuda else ("bf16",):
            with recording.part(f"{recipe} in {precision}"):
                need(*packages)
                cases.append(Case(recipe, precision, *steps))
    workers = len(cases) * 3 if setup.on_cuda else 2
    with ThreadPoolExecutor(workers) as pool, tempfile.TemporaryDirectory() as folder:
        futures: dict[Case, tuple[Future[str], Future[str] | None, Future[str]]] = {}
        for case in cases:
            place = Path(folder, f"{case.recipe}_{case.precision}")
            futures[case] = (
                pool.submit(_straight, case, place / "straight"),
                None if setup.small else pool.submit(_straight, case, place / "again"),
                pool.submit(_resumed, case, place / "resumed"),
            )
        for case, (straight, again, resumed) in futures.items():
            place = Path(folder, f"{case.recipe}_{case.precision}")
            with recording.part(f"{case.recipe} in {case.precision}"):
                result = straight.result()
                if again is not None:
                    again.result()
                killed = resumed.result()
                _compare(recording, case, place, result, killed)


def _compare(recording: Recording, case: Case, place: Path, result: str, killed: str) -> None:
    last = f"checkpoint-{case.max_steps}"
    expected = _tensors(place / "straight" / last)
    repeated: int | None = None
    if (place / "again").exists():
        repeated = _differing(expected, _tensors(place / "again" / last))
    continued = _differing(expected, _tensors(place / "resumed" / last))
    recording.row(
        "recipes, killed and resumed",
        {
            "recipe": case.recipe,
            "precision": case.precision,
            "updates": case.max_steps,
            "killed": killed,
            "tensors at the end": len(expected),
            "different in a second run": repeated,
            "different in the resumed run": continued,
            "result": result,
        },
    )
    name = f"{case.recipe} in {case.precision}"
    recording.check(
        f"{name}: a resumed run ends like one that was not killed",
        holds=continued == 0,
        found=f"{continued} of {len(expected)} tensors differ; in a second run: {repeated}",
    )
    recording.summarize_more(f"{name}: {continued} tensors differ")


def _run(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=FOLDER / "tmp"
        )


def _ended(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait for a training; return its line of results.

    Raises:
        RuntimeError: If it fails.
    """
    try:
        code = process.wait(SECONDS)
    finally:
        process.kill()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if code:
        msg = f"the training ended with {code}: {' / '.join(lines[-4:])}"
        raise RuntimeError(msg)
    return next((line for line in reversed(lines) if line.startswith("result: ")), "no result")


def _straight(case: Case, folder: Path) -> str:
    log = folder.with_suffix(".log")
    return _ended(_run(case.command(folder), log), log).removeprefix("result: ")


def _resumed(case: Case, folder: Path) -> str:
    """Kill a training after its first checkpoint, and resume it; return where it was killed."""
    log = folder.with_suffix(".log")
    process = _run(case.command(folder), log)
    deadline = time.monotonic() + SECONDS
    checkpoint = folder / f"checkpoint-{case.save_steps}"
    while process.poll() is None and not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        _ended(process, log)
        msg = "the training ended before it could be killed"
        raise RuntimeError(msg)
    found = sorted(int(each.name.split("-")[1]) for each in folder.glob("checkpoint-*"))
    _ended(_run(case.command(folder, "--resume=auto"), log), log)
    return f"after checkpoint {found[-1]}"


def _tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return weights, averages and the optimizer's state of a checkpoint."""
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        found |= {f"{file.stem}.{name}": value for name, value in load_file(file).items()}
    states = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    for index, state in states["state"].items():
        found |= {f"optimizer.{index}.{name}": torch.as_tensor(v) for name, v in state.items()}
    return found


def _differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    names = expected.keys() | found.keys()
    return sum(
        name not in expected or name not in found or not torch.equal(expected[name], found[name])
        for name in names
    )


def _planted_nan(recording: Recording, setup: Setup) -> None:
    """A module returns NaN for one row of the data set: the record must name module and row."""
    ways.forget_accelerators()
    network = networks.llama(setup, 128, 3, vocabulary=512, length=64)
    seen: dict[str, Tensor] = {}

    def look(_: Any, arguments: tuple[Tensor, ...]) -> None:
        seen["bad"] = (arguments[0] == 511).any(-1)[:, None, None]

    def spoil(_: Any, __: Any, output: Tensor) -> Tensor:
        return torch.where(seen["bad"], float("nan"), output)

    network.model.embed_tokens.register_forward_pre_hook(look)
    network.model.layers[1].mlp.register_forward_hook(spoil)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 511, (40, 32), generator=generator)
    rows[BAD_ROW, 5] = 511
    with tempfile.TemporaryDirectory() as folder:
        trainer = MFTrainer(
            network,
            TrainingArguments(
                folder,
                max_steps=10,
                per_device_train_batch_size=4,
                use_cpu=not setup.on_cuda,
                bf16=True,
                logging_steps=5,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                log_level="error",
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[TrainingStateMonitor(replay=True, folder=folder)],
        )
        trainer.train()
        files = list(Path(folder).rglob("anomalies.jsonl"))
        lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    records = [json.loads(line) for line in lines]
    for record in records:
        samples = [sample.get("index") for sample in record.get("samples", [])]
        names = ("step", "kind", "cause", "name", "replay", "is_replay_exact")
        columns = {name: str(record.get(name)) for name in names}
        recording.row("a planted NaN", {**columns, "rows of the data set": str(samples)})
    found = [(each.get("name"), *(s.get("index") for s in each["samples"])) for each in records]
    recording.check(
        "the NaN is traced to its module and row",
        holds=("model.layers.1.mlp", BAD_ROW) in found,
        found=str(found),
    )
    report = trainer.attached.last_report
    skipped = -1 if report is None else int(report.skipped_updates)
    finite = all(bool(weight.isfinite().all()) for weight in network.parameters())
    recording.check(
        "one update is skipped, and the weights are finite",
        holds=finite and skipped == 1,
        found=f"{skipped} skipped; weights {'finite' if finite else 'not finite'}",
    )
