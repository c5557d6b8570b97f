"""Imports go to lower levels only, and each file has a test."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

LEVELS = (
    {"compatibility"},
    {"arguments", "collectives", "names", "outputs"},
    {"schedules", "tensors"},
    {
        *("average", "checkpoints", "config", "loss_scale", "memory", "optimizers", "preflight"),
        "termination",
    },
    {"records"},
    {"step"},
    {"accelerate", "sharded_checkpoint"},
    {"trainer"},
    {"mindspore"},
    {"mfwrap", "model"},
    {"callbacks"},
    {"report"},
    {"recipes"},
    {"runner"},
    {"comparison", "porting", "recipe"},
    {"cli"},
)
"""Packages and single modules of mfwrap, lowest first. Each imports from lower levels and from its
own package only. ``mfwrap`` is the package's own ``__init__``; ``__main__`` is above all levels."""

LEVEL = {name: number for number, names in enumerate(LEVELS, 1) for name in names}

ORDER_INSIDE = {
    "callbacks": (
        {"shared"},
        {"culprit"},
        {"average", "loss_monitor", "memory", "mindspore", "training_state"},
    ),
    "recipes": ({"data"}, {"models"}, {"tasks"}),
}
"""Packages inside callbacks/ and recipes/, lowest first. Files outside these packages are above."""

FIRST_LEVEL_OF = {"accelerate": 7, "transformers": 8, "matplotlib": 12}
"""By library: the lowest level that may import it."""

PUBLIC = {"mfwrap", "accelerate", "model", "trainer", "callbacks", "recipes", "report"}
"""Packages whose public names callbacks and recipes may import, in addition to levels 1 to 5."""

FILES_WITHOUT_A_TEST = {
    # `python -m mfwrap` only calls the command line, so the command line's tests cover it.
    "mfwrap/__main__.py": "unit/test_cli.py",
    # Rows of the table of names, which one test reads together.
    "mfwrap/names/libraries.py": "unit/names/test_counterparts.py",
    "mfwrap/names/training.py": "unit/names/test_counterparts.py",
}
"""Source files without a test file of the same name, and the test file that covers each."""


def module_name(path: Path) -> str:
    """Return a file's name in imports: ``callbacks/x.py`` is imported as mfwrap.callbacks.x."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "mfwrap" else ("mfwrap", *parts))


def source_files() -> list[Path]:
    """Return the package's Python files: those in mfwrap/, callbacks/ and recipes/."""
    folders = ("mfwrap", "callbacks", "recipes")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


MODULES = {module_name(path).removesuffix(".__init__") for path in source_files()}


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a syntax tree except those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from runtime_nodes(node)


def imported_names(
    source: str, module: str, nodes: Callable[[ast.AST], Iterator[ast.AST]] = runtime_nodes
) -> Iterator[tuple[int, str]]:
    """Yield the line and absolute name of each import of a module, also inside functions."""
    package = module.removesuffix(".__init__").split(".")
    if not module.endswith(".__init__"):
        package.pop()
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*start, *filter(None, [node.module])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def module_of(name: str) -> str:
    """Return the module of an imported name: the longest leading part that is a module."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def place_of(module: str) -> str:
    """Return the entry of LEVELS that a module of mfwrap belongs to."""
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else "mfwrap"


def rank_inside(module: str) -> int:
    """Return the level of a module in ORDER_INSIDE; the lowest is 0."""
    _, folder, *rest = module.removesuffix(".__init__").split(".")
    order = ORDER_INSIDE[folder]
    package = rest[0] if rest and f"mfwrap.{folder}.{rest[0]}" in MODULES else ""
    return next((i for i, names in enumerate(order) if package in names), len(order))


def fault(importer: str, name: str) -> str | None:
    """Return why the module `importer` must not import `name`; None if it may."""
    place = place_of(importer)
    library, *_ = name.split(".")
    if place == "__main__":
        return None
    if library in {"callbacks", "recipes"}:
        return f"`{library}` must be imported as `mfwrap.{library}`"
    if library == "mfwrap":
        return fault_of_module(importer, module_of(name))
    # `compatibility` imports libraries inside functions only; `test_import_needs_torch_alone` sees.
    first = 0 if place == "compatibility" else FIRST_LEVEL_OF.get(library, 0)
    return f"only levels >= {first} may import `{library}`" if LEVEL[place] < first else None


def fault_of_module(importer: str, module: str) -> str | None:
    """Return why a module of mfwrap must not import another module of mfwrap; None if it may."""
    place, imported = place_of(importer), place_of(module)
    if imported == place:
        return fault_inside(importer, module) if place in ORDER_INSIDE else None
    if imported not in LEVEL:
        return f"`{imported}` is missing in LEVELS"
    if LEVEL[imported] >= LEVEL[place]:
        return f"`{imported}` must be on a lower level than `{place}`"
    is_open = LEVEL[imported] <= 5 or (imported in PUBLIC and module.count(".") < 2)
    if place in ORDER_INSIDE and not is_open:
        return f"`{module}` must be public or on levels 1 to 5"
    return None


def fault_inside(importer: str, module: str) -> str | None:
    """Return why a module must not import another module of its own folder; None if it may.

    The folder is callbacks/ or recipes/.
    """
    package, other = importer.rpartition(".")[0], module.rpartition(".")[0]
    if package in {other, module} or importer.endswith("s.__init__"):
        return None
    room, others_room = (".".join(each.split(".")[:3]) for each in (importer, module))
    if room == others_room:
        return None
    if rank_inside(module) >= rank_inside(importer):
        return f"`{module}` must be on a lower level than `{importer}`"
    return None


def faults(source: str, module: str) -> list[str]:
    """Return a message for each import in a file that the levels forbid."""
    if place_of(module) not in {*LEVEL, "__main__"}:
        return [f"{module}: `{place_of(module)}` is missing in LEVELS"]
    return [
        f"{module}, line {line}: imports {name}: {wrong}"
        for line, name in imported_names(source, module)
        if (wrong := fault(module, name))
    ]


def test_imports_run_downwards():
    """Each file imports only from its own package and from lower levels."""
    found = [
        wrong
        for path in source_files()
        for wrong in faults(path.read_text(encoding="utf-8"), module_name(path))
    ]

    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mfwrap.step.update", "from mfwrap.accelerate.loop_step import LoopStep"),
        ("mfwrap.step.update", "import mfwrap.accelerate.loop_step"),
        ("mfwrap.step.update", "from ..accelerate import loop_step"),
        ("mfwrap.step.update", "def late():\n    import mfwrap.trainer.mixin"),
        ("mfwrap.step.update", "from mfwrap import MFTrainOneStepCell"),
        ("mfwrap.step.update", "import mfwrap"),
        ("mfwrap.step.update", "from mfwrap.callbacks import MFLossMonitor"),
        ("mfwrap.step.update", "from callbacks import MFLossMonitor"),
        ("mfwrap.step.update", "from mfwrap import recipes"),
        ("mfwrap.step.update", "import transformers"),
        ("mfwrap.step.update", "def late():\n    from transformers.trainer import Trainer"),
        ("mfwrap.step.update", "from accelerate import Accelerator"),
        ("mfwrap.trainer.mixin", "from mfwrap.model import Model"),
        ("mfwrap.step.cell", "from mfwrap.mindspore.cells import WithLossCell"),
        ("mfwrap.tensors.norms", "from mfwrap.schedules.warm_up import FormulaLR"),
        ("mfwrap.unheard_of", "import torch"),
        ("mfwrap.__init__", "from mfwrap.callbacks import MFLossMonitor"),
        ("mfwrap.__init__", "from . import recipes"),
        ("mfwrap.callbacks.eval_callback", "from mfwrap.step.cell import MFTrainOneStepCell"),
        ("mfwrap.callbacks.eval_callback", "from mfwrap.trainer.mixin import MFTrainer"),
        ("mfwrap.callbacks.eval_callback", "from ..accelerate.state import save"),
        ("mfwrap.callbacks.eval_callback", "from mfwrap.recipes import causal_lm"),
        ("mfwrap.callbacks.shared.run_log", "from mfwrap.callbacks.culprit import finder"),
        ("mfwrap.callbacks.loss_monitor.run", "from mfwrap.callbacks.average import files"),
        ("mfwrap.recipes.causal_lm", "from mfwrap.step.clipping import clip_by_value"),
        ("mfwrap.recipes.data.source", "from mfwrap.recipes.tasks.table import TASKS"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str):
    """A forbidden import is reported once, however it is written."""
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mfwrap.step.clipping", "import torch\nfrom mfwrap.config import StepConfig"),
        ("mfwrap.step.cell", "if TYPE_CHECKING:\n    from accelerate import Accelerator"),
        ("mfwrap.accelerate.setup", "from accelerate import Accelerator"),
        ("mfwrap.trainer.mixin", "from transformers import Trainer\nfrom .log import Losses"),
        ("mfwrap.__init__", "from mfwrap.step.cell import MFTrainOneStepCell"),
        ("mfwrap.callbacks.__init__", "from .loss_monitor.monitor import MFLossMonitor"),
        ("mfwrap.callbacks.eval_callback", "from mfwrap import StepOutput"),
        ("mfwrap.callbacks.eval_callback", "from mfwrap.arguments import check_int"),
        (
            "mfwrap.callbacks.average.files",
            "from mfwrap.callbacks.shared.run_log import run_logger",
        ),
        ("mfwrap.recipes.causal_lm", "from mfwrap.accelerate import attach\nimport mfwrap"),
        ("mfwrap.recipes.causal_lm", "from mfwrap.callbacks import MFLossMonitor"),
    ],
)
def test_a_right_import_passes(module: str, source: str):
    """Imports from lower levels, other libraries and public packages are allowed."""
    assert faults(source, module) == []


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return each group of modules that import each other, directly or through other modules."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen, pending = set(), [module]
        while pending:
            for target in imports.get(pending.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
        reached[module] = seen
    groups = {
        frozenset(other for other in found if module in reached.get(other, ()))
        for module, found in reached.items()
        if module in found
    }
    return [sorted(group) for group in groups]


def test_no_circle_inside_a_package():
    """No modules import each other, directly or through other modules, also not for types alone.

    The ``__init__`` of a package names for types what it imports late.
    """
    imports = {}
    for path in source_files():
        module = module_name(path).removesuffix(".__init__")
        nodes = runtime_nodes if path.name == "__init__.py" else ast.walk
        names = imported_names(path.read_text(encoding="utf-8"), module_name(path), nodes)
        targets = {module_of(name) for _, name in names if name.split(".")[0] == "mfwrap"}
        imports[module] = targets - {module, "mfwrap"}

    assert circles(imports) == []


def test_a_circle_is_found():
    """`circles` finds a circle of three modules and leaves out a module outside of it."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_package_is_installed():
    """pyproject.toml lists every package; a wheel lacks packages that are not listed."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {module_name(path.parent) for path in source_files()}

    assert set(settings["tool"]["setuptools"]["packages"]) == folders


def test_every_folder_of_python_files_is_a_package():
    """Every folder of Python files has an ``__init__.py``.

    Without it, the folder is a namespace package, and other distributions can add modules to it.
    """
    without = {path.parent for path in source_files() if not (path.parent / "__init__.py").exists()}

    assert without == set()


def test_no_more_than_a_dozen_modules_lie_beside_the_packages():
    """mfwrap/ and callbacks/ each have at most 12 modules outside of packages."""
    for folder in ("mfwrap", "callbacks"):
        assert len(list((ROOT / folder).glob("*.py"))) <= 12


def test_every_file_has_a_test_of_its_name():
    """Each source file has a test file of the same name or an entry in FILES_WITHOUT_A_TEST."""
    missing = []
    for path in source_files():
        relative = path.relative_to(ROOT)
        inside = Path(*relative.parts[1:]) if relative.parts[0] == "mfwrap" else relative
        tests = TESTS / "unit" / inside.parent
        has_own = (tests / f"test_{path.name}").exists()
        if path.name == "__init__.py":
            continue
        elsewhere = FILES_WITHOUT_A_TEST.get(str(relative))
        if elsewhere is not None:
            assert not has_own, f"{relative} has a test file: remove it from FILES_WITHOUT_A_TEST"
            assert (TESTS / elsewhere).exists(), f"{relative}: no test file {elsewhere}"
        elif not has_own:
            missing.append(str(relative))

    assert missing == []


COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list"),
    *("gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
    *("get_rank", "get_world_size", "is_available", "is_initialized"),
}
"""Functions of ``torch.distributed`` that only ``mfwrap.collectives`` may use."""


def collectives_in(source: str) -> list[str]:
    """Return the names in COLLECTIVES that a file uses from ``torch.distributed``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("distributed"):
            found.append(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            found += [alias.name for alias in node.names]
    return sorted(COLLECTIVES.intersection(found))


def test_collectives_begin_in_one_place():
    """Only ``mfwrap.collectives`` uses the functions of ``torch.distributed`` in COLLECTIVES."""
    used = {
        module_name(path): names
        for path in source_files()
        if (names := collectives_in(path.read_text(encoding="utf-8")))
    }

    assert [name for name in used if not name.startswith("mfwrap.collectives.")] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.all_reduce(norm)",
        "from torch import distributed\ndistributed.all_reduce(norm)",
        "from torch.distributed import all_reduce",
    ],
)
def test_a_collective_elsewhere_is_found(source: str):
    """A collective is found however a file imports ``torch.distributed``."""
    assert collectives_in(source) == ["all_reduce"]


def test_import_needs_torch_alone():
    """A fresh import of the cells loads neither transformers nor accelerate nor matplotlib."""
    program = (
        "import sys\n"
        "from mfwrap import LossScaleManager, MFTrainOneStepCell, TrainOneStepCell, grad\n"
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
