"""Imports run one way: a lower room never knows a higher one."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

LEVELS = (
    {
        "absent_names",
        "arguments",
        "callback_files",
        "callers",
        "checkpoint_folders",
        "checkpoints",
        "deferred_schedule",
        "devices",
        "random_states",
        "run_context",
        "sharded",
        "shard_files",
        "termination",
    },
    {"data_position", "gradient_request", "outputs", "config", "warm_up", "wrappers"},
    {"rank_termination"},
    {"norms", "shard_updates"},
    {"norm_reduction"},
    {"averaged_tensors", "averaging", "ema_arguments", "gradient_call", "schedule_formulas"},
    {"loss_scale", "gradients", "optimizers", "ema", "deferred", "micro_batches", "step_files"},
    {"annealing_schedules", "cosine_schedules", "functional", "warm_up_schedules"},
    {"adaptive_loss_scale", "scale_sense", "parameters", "losses", "update_counts"},
    {"loss_scale_managers", "schedules"},
    {"amp", "fsdp_parts", "local_norm", "ranks"},
    {"fsdp_local_norm"},
    {"accumulation", "measurement", "shared_state", "step_state"},
    {"update"},
    {"base_cells", "cell_accelerator", "optimizer_window"},
    {"cell", "loop_clipping"},
    {"accelerate_ddp", "deepspeed_cell", "loop_step", "sharded_checkpoint"},
    {"accelerate_classes", "accelerate_setup", "accelerate_state"},
    {"accelerate_scaler"},
    {"attached_step"},
    {"accelerate"},
    {"trainer_checkpoint", "trainer_events", "trainer_log", "trainer_settings"},
    {"amp_level", "callback_adapter", "model_data", "model_metrics"},
    {"evaluation", "train_network"},
    {"evaluator", "model_run", "model_updates"},
    {"model_loop"},
    {"trainer_losses", "trainer_saving"},
    {"trainer", "model"},
    {"callbacks"},
    {"run_record"},
    {"run_drawing"},
    {"run_maps"},
    {"run_panels"},
    {"run_page"},
    {"recipes"},
    {
        "recipe_mindformers_evaluation",
        "recipe_mindformers_model",
        "recipe_mindformers_monitors",
        "recipe_names",
        "recipe_yaml",
    },
    {"recipe_library"},
    {"recipe_format", "recipe_objects"},
    {"recipe_callbacks", "recipe_metrics", "recipe_peft", "recipe_schedule", "recipe_step"},
    {"recipe_folder", "recipe_training"},
    {"recipe"},
    {"cli_output", "recipe_mindformers", "recipe_run"},
    {"cli_plot", "cli_report"},
    {"cli"},
    {"__main__"},
)
"""The rooms, lowest first. A room imports from lower levels only, never from its own."""

LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MAY_IMPORT_TRANSFORMERS = {
    *{"trainer", "trainer_checkpoint", "trainer_events", "trainer_losses", "trainer_saving"},
    *{"trainer_settings"},
    *{"callback_adapter", "model_data", "model_run"},
    *{"model", "callbacks", "cli", "recipes"},
    *{"recipe", "recipe_callbacks", "recipe_folder", "recipe_metrics", "recipe_run"},
    "recipe_training",
}
FOLDERS = {"callbacks", "recipes"}
PUBLIC = {"accelerate", "model", "trainer", "callbacks"}
"""What the folders may import beside the names of ``mfwrap`` itself and their own files."""


def module_name(path: Path) -> str:
    """Return the name under which a file is imported: ``callbacks/x.py`` is mfwrap.callbacks.x."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "mfwrap" else ("mfwrap", *parts))


def imported_names(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import, wherever in the file, relative ones resolved."""
    package = module.removesuffix(".__init__").split(".")
    if not module.endswith(".__init__"):
        package.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*start, *filter(None, [node.module])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str:
    """Return the room that a name of mfwrap lies in; "" for the public surface."""
    room = name.split(".")[1] if "." in name else ""
    return room if room in LEVEL or (ROOT / "mfwrap" / f"{room}.py").exists() else ""


def fault(importer: str, name: str) -> str | None:
    """Say what is wrong with the import of `name` in a room ("" for mfwrap/__init__.py)."""
    package, *_ = name.split(".")
    if package == "transformers" and importer not in MAY_IMPORT_TRANSFORMERS:
        return f"only {sorted(MAY_IMPORT_TRANSFORMERS)} import transformers"
    if package in FOLDERS:
        return f"`{package}` is imported as `mfwrap.{package}`"
    if package != "mfwrap":
        return None
    imported = room_of(name)
    if importer == "":
        return f"the library never imports `{imported}`" if imported in FOLDERS else None
    if importer in FOLDERS:
        public = imported in {"", importer} | PUBLIC
        return None if public else f"`{imported}` is no part of the public surface"
    return room_fault(importer, imported)


def room_fault(importer: str, imported: str) -> str | None:
    """Say why one room of mfwrap may not import the other."""
    if imported == "":
        return "a room imports rooms, not the package"
    if imported not in LEVEL:
        return f"`{imported}` is in none of LEVELS"
    if LEVEL[imported] >= LEVEL[importer]:
        return f"`{imported}` is not below `{importer}`"
    return None


def faults(source: str, module: str) -> list[str]:
    """List the imports of a file that run the wrong way."""
    importer = module.split(".")[1].replace("__init__", "")
    if importer and importer not in LEVEL:
        return [f"{module}: `{importer}` is in none of LEVELS; give the new room its place"]
    return [
        f"{module}, line {line}: imports {name}: {wrong}"
        for line, name in imported_names(source, module)
        if (wrong := fault(importer, name))
    ]


def source_files() -> list[Path]:
    """List the Python files of the package, all three folders."""
    folders = ("mfwrap", "callbacks", "recipes")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports_run_one_way(path: Path):
    """No file imports from a room beside or above its own."""
    assert faults(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mfwrap.step.clipping", "from mfwrap.step.cell import MFTrainOneStepCell"),
        ("mfwrap.step.clipping", "from mfwrap.step.optimizers import learning_rates"),
        ("mfwrap.step.clipping", "from mfwrap import optimizers"),
        ("mfwrap.step.clipping", "import mfwrap.step.update"),
        ("mfwrap.step.clipping", "from .update import StepUpdate"),
        ("mfwrap.step.clipping", "from . import update"),
        ("mfwrap.step.clipping", "def late():\n    import mfwrap.step.update"),
        ("mfwrap.step.clipping", "from mfwrap import MFTrainOneStepCell"),
        ("mfwrap.step.clipping", "import mfwrap"),
        ("mfwrap.step.cell", "from mfwrap.callbacks import MFLossMonitor"),
        ("mfwrap.step.cell", "from callbacks import MFLossMonitor"),
        ("mfwrap.step.cell", "from mfwrap import recipes"),
        ("mfwrap.step.cell", "import transformers"),
        ("mfwrap.step.cell", "def late():\n    from transformers.trainer import Trainer"),
        ("mfwrap.trainer", "from mfwrap.model import Model"),
        ("mfwrap.unheard_of", "import torch"),
        ("mfwrap.__init__", "from mfwrap.callbacks import MFLossMonitor"),
        ("mfwrap.__init__", "from . import recipes"),
        ("mfwrap.__init__", "import transformers"),
        ("mfwrap.callbacks.loss_monitor.monitor", "from mfwrap.outputs import StepOutput"),
        ("mfwrap.callbacks.loss_monitor.monitor", "from mfwrap import outputs"),
        ("mfwrap.callbacks.loss_monitor.monitor", "from ..outputs import StepOutput"),
        ("mfwrap.callbacks.loss_monitor.monitor", "from mfwrap.recipes import causal_lm"),
        ("mfwrap.recipes.causal_lm", "from mfwrap.step.clipping import NormGroups"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str):
    """Each way to write an import that runs the wrong way is seen, once."""
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mfwrap.step.clipping", "import torch\nfrom mfwrap.config import LocalNormGroups"),
        ("mfwrap.accelerate", "from accelerate import Accelerator"),
        ("mfwrap.trainer", "from transformers import Trainer\nfrom .update import StepUpdate"),
        ("mfwrap.__init__", "from mfwrap.step.cell import MFTrainOneStepCell"),
        ("mfwrap.callbacks.__init__", "from .loss_monitor import MFLossMonitor"),
        ("mfwrap.callbacks.loss_monitor.monitor", "from mfwrap import StepOutput"),
        ("mfwrap.callbacks.loss_monitor.monitor", "from mfwrap.callbacks.trigger import Trigger"),
        ("mfwrap.recipes.causal_lm", "from mfwrap.accelerate import attach\nimport mfwrap"),
        ("mfwrap.recipes.causal_lm", "from mfwrap.callbacks import MFLossMonitor"),
    ],
)
def test_a_right_import_passes(module: str, source: str):
    """Imports of lower rooms, of other packages and of the public surface are no fault."""
    assert faults(source, module) == []


def test_import_needs_torch_alone():
    """A fresh import of the cell loads neither transformers nor accelerate nor matplotlib."""
    program = (
        "import sys\n"
        "from mfwrap import MFTrainOneStepCell\n"
        "print(sorted({'accelerate', 'matplotlib', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.stdout.strip(), result.stderr) == ("[]", "")
