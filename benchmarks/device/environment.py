"""The environment of the sections: the package, carried wheels, and nothing outside the folders.

Neither network nor an installation is needed: links give mfwrap the shape of an installed package,
and wheels that were fetched on another machine are unpacked into a folder. Both folders are on
PYTHONPATH, the wheels first. So a package that was carried is used in place of the machine's own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
FOLDER = ROOT / "build" / "device-env"
"""Links, unpacked wheels, caches and temporary files. The name is short, because the paths of
sockets in it may have 107 bytes."""


def link_package(tree: Path) -> None:
    """Link the sources into `tree` in the shape of the installed package."""
    package = tree / "mfwrap"
    package.mkdir(parents=True)
    for path in [*(ROOT / "mfwrap").iterdir(), ROOT / "callbacks", ROOT / "recipes"]:
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)


def unpack_wheels(wheels: Path, target: Path) -> str:
    """Install all wheels of a folder into `target`, without network.

    Returns:
        What was done, or why nothing was, in one line.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        return f"none in {wheels}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-cache-dir", "--no-compile", "--disable-pip-version-check"]
    command += ["--target", str(target), *map(str, files)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        shutil.rmtree(target, ignore_errors=True)
        lines = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        return f"not installed: {lines[-1] if lines else f'pip ended with {ended.returncode}'}"
    return f"installed: {', '.join('-'.join(file.name.split('-')[:2]) for file in files)}"


def prepare(device: str, wheels: Path | None) -> tuple[dict[str, str], str]:
    """Build the environment of the sections anew.

    Args:
        device: ``"cuda"`` or ``"cpu"``. All GPUs but the first are hidden, and
            on a CPU all of them.
        wheels: Folder of wheels; ``None`` for the machine's packages alone.

    Returns:
        The variables of the sections' processes, and what became of the wheels.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    tree, packages, caches = FOLDER / "tree", FOLDER / "packages", FOLDER / "caches"
    link_package(tree)
    (FOLDER / "tmp").mkdir()
    outcome = "not asked for" if wheels is None else unpack_wheels(wheels, packages)
    paths = [packages] if packages.is_dir() else []
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    cache_variables = (
        *("HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "CUDA_CACHE_PATH"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
    )
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, tree, BENCHMARKS, *given])),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(FOLDER / "tmp"),
        # Without network, a question to the hub would only cost time.
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: str(caches / name.lower()) for name in cache_variables},
    }
    # With several GPUs, the Trainer would wrap the network in DataParallel.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    variables["CUDA_VISIBLE_DEVICES"] = first if device == "cuda" else ""
    return variables, outcome
