"""Describe the machine and the versions, and measure how fast its memory is copied.

    python -m device.machine --device cuda

`device.command` runs it once, before the sections, and keeps what it prints: one JSON object.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from device.environment import FOLDER, ROOT
from device.measuring import copied_bytes_per_second
from device.setup import Setup

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "triton", "datasets", "trl", "peft")


def versions() -> dict[str, str]:
    """Return the version of each package that is there; "(wheel)" follows one that was carried."""
    carried = FOLDER / "packages"
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        is_carried = Path(str(distribution.locate_file(""))).resolve() == carried.resolve()
        found[name] = distribution.version + (" (wheel)" if is_carried else "")
    found["torch"] = torch.__version__  # with its build
    return found


def revision() -> str | None:
    """Return the commit of the checkout, with "+" if files differ.

    Without git, return the variable REVISION; None if it is not set, either.
    """
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("REVISION") or None
    return commit + ("+" if changes else "")


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)", text, flags=re.MULTILINE)
    return name[1] if name else platform.machine()


def describe(setup: Setup) -> dict[str, Any]:
    """Return what a reader of the results must know of the machine."""
    found: dict[str, Any] = {
        "kind": setup.kind,
        "name": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "revision": revision(),
    }
    if setup.on_cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
        }
    num_bytes = setup.size(2**32 if setup.on_cuda else 2**28, 2**22)
    found["copied_gb_per_second"] = round(copied_bytes_per_second(setup, num_bytes) / 1e9, 1)
    return found


def main() -> None:
    """Print the description."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(describe(Setup(arguments.device, small=arguments.small))))


if __name__ == "__main__":
    main()
