"""Run scripts of other libraries with and without mfwrap, and write docs/scripts_table.md.

    python .ci/scripts_table.py                           # as `make scripts` does
    python .ci/scripts_table.py run_glue trl/scripts      # only scripts whose path has one of these
    python .ci/scripts_table.py --sources FOLDER          # with scripts that are there already

FOLDER has a folder for each library, with the name and the files of its repository, and a file
VERSION that says which version this is. Without it, the scripts of the installed versions are
fetched from GitHub. They are never copied into this repository. What a run makes is in
build/scripts/: the sources, the models and data sets, and the output of each script.
"""

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "scripts"
PACKAGES = BUILD / "packages"


def main() -> None:
    """Compare scripts, print each result, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of paths; by default all scripts")
    parser.add_argument("--sources", type=Path, help="folder with the scripts")
    parser.add_argument("--output", type=Path, help="page to write; by default the one in docs/")
    arguments = parser.parse_args()
    prepare_environment()
    from support.scripts_table import page
    from support.scripts_table.rows import LIBRARIES, SCRIPTS
    from support.scripts_table.runs import run

    chosen = [
        script
        for script in SCRIPTS
        if not arguments.names or any(name in script.title for name in arguments.names)
    ]
    if not chosen:
        parser.error("no path has one of these parts")
    install(sorted({script.package for script in chosen} - {""}))
    sources = arguments.sources or fetched(LIBRARIES)
    hub = made_hub()
    text = page.PAGE.read_text(encoding="utf-8") if page.PAGE.exists() else ""
    found, versions = page.read_cells(text)
    all_cells = {
        key: found.get(key, page.NOT_COMPARED)
        for key in ((script.library, script.title) for script in SCRIPTS)
    }
    for script in chosen:
        source = sources.resolve() / script.library
        versions[script.library] = (source / "VERSION").read_text(encoding="utf-8").strip()
        folder = BUILD / "runs" / script.library / script.title.replace("/", "_")
        written = (source / script.path).read_text(encoding="utf-8")
        result = page.cells(script, written, partial(run, script, source, hub, folder))
        all_cells[script.library, script.title] = result
        print(f"{script.library}: {script.title}: {'; '.join(result[1:])}", flush=True)
        output = arguments.output or page.PAGE
        output.write_text(page.page(all_cells, versions, page.present_versions()), encoding="utf-8")
    if any(cells.result.startswith("differs") for cells in all_cells.values()):
        sys.exit("some scripts differ")


def prepare_environment() -> None:
    """Set what the processes of the scripts inherit: they train on a CPU, without network."""
    search = [str(ROOT / "tests"), str(PACKAGES)]
    sys.path[:0] = search
    inherited = os.environ.get("PYTHONPATH")
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([*search, *([inherited] if inherited else [])]),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(BUILD / "cache"),
        "WANDB_MODE": "disabled",
    }


def install(packages: Sequence[str]) -> None:
    """Install packages that only scripts need, without their dependencies."""
    present = {
        each.name for each in importlib.metadata.distributions(path=[str(PACKAGES), *sys.path])
    }
    missing = [package for package in packages if package not in present]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(PACKAGES), *missing], check=True)


def fetched(libraries: Sequence[str]) -> Path:
    """Fetch the scripts of the installed versions from GitHub, and return their folder."""
    sources = BUILD / "sources"
    for library in libraries:
        tag, folder = f"v{importlib.metadata.version(library)}", sources / library
        named, name = folder / "VERSION", f"version {tag[1:]}"
        if named.exists() and named.read_text(encoding="utf-8") == name:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        address = f"https://github.com/huggingface/{library}"
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, address, str(folder)]
        if subprocess.run(clone, check=False).returncode:
            sys.exit(
                f"cannot fetch {address} at {tag}; name a folder that has the scripts with "
                "`make scripts SOURCES=folder`"
            )
        named.write_text(name, encoding="utf-8")
    return sources


def made_hub() -> Path:
    """Make the models and data sets anew, and return their folder."""
    from support.scripts_table.hub import make_hub

    hub = BUILD / "hub"
    shutil.rmtree(hub, ignore_errors=True)
    make_hub(hub)
    return hub


if __name__ == "__main__":
    main()
