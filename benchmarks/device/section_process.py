"""Run one section in this process.

    python -m device.section_process NAME --device cuda --file NAME.json [--small]

`device.command` starts it, with the environment of `device.environment`.
"""

import argparse
import faulthandler
import importlib
import os
import signal
import sys
from pathlib import Path

from device.recording import Recording
from device.setup import Setup


def main() -> None:
    """Measure the section, and leave without waiting for what its libraries still do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    # Before a section is killed at its limit, this signal shows where it is.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    recording = Recording(arguments.file)
    section = importlib.import_module(f"device.sections.{arguments.name}")
    with recording.part(arguments.name):
        section.measure(recording, Setup(arguments.device, small=arguments.small))
    recording.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # after a CUDA error, a library may fail or hang at the end of the interpreter


if __name__ == "__main__":
    main()
