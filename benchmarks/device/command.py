"""Measure and test mfwrap on a GPU, section by section.

    make device                                # on a GPU, at most seven minutes
    make device SECTIONS="tests waits"         # some sections
    make device LIMIT=240                      # at most four minutes
    make device DEVICE=cpu SMALL=1             # everything on a CPU, with tiny sizes

Each section has a process and a time limit of its own, so a section that fails, hangs or spoils
its CUDA context does not stop the others. The results are written to ``device.json`` in the folder
that the variable OUT names (by default build/device), while the sections run; what sections that
failed have printed is written to ``failures.log``. After a kill, ``running.log`` has what the
section has printed that was running. The output ends with a table of one line for
each section.

This process does not import torch.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device import environment, plan, results, tables

LOG_TAIL = 4_000_000
"""Bytes of the output of a failed section that are kept."""

LOG_SIZE = 15_000_000
"""Bytes of the output of all failed sections that are kept."""

DESCRIPTION_SECONDS = 60.0
"""Seconds that the description of the machine may take."""

GRACE = 1.0
"""Seconds that a section has to say where it is before it is killed."""


def run_section(
    name: str, command: Sequence[str], variables: Mapping[str, str], limit: float, run: "Run"
) -> dict[str, Any]:
    """Run a section in its own process, and copy what it records into the results.

    Args:
        name: Name of the section.
        command: Its command line.
        variables: Its environment.
        limit: Seconds after which its process is killed.
        run: Results of the run.

    Returns:
        The result of the section.
    """
    file, log = run.work / f"{name}.json", run.running_log
    started = time.monotonic()
    seen = None
    with log.open("w", encoding="utf-8") as output:
        # A process group, so that what the section starts can be killed, too. It is no new session:
        # a machine that ends the processes of a session ends these as well.
        process = subprocess.Popen(
            [*command, "--file", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            cwd=environment.ROOT,
            process_group=0,
        )
        try:
            while (code := waited(process, 0.5)) is None and time.monotonic() - started < limit:
                changed = file.stat().st_mtime_ns if file.exists() else None
                if changed != seen:  # what was measured so far is not lost if this run is killed
                    seen = changed
                    run.keep(name, recorded(file) | {"limit": limit})
            if code is None:
                process.send_signal(signal.SIGUSR1)  # prints where the section is
                waited(process, GRACE)
        finally:
            kill_group(process)
    result = recorded(file) | {"seconds": round(time.monotonic() - started, 1), "limit": limit}
    if code is None:
        kept = "; its tables are incomplete" if result["tables"] else ""
        result |= {"status": "not run", "reason": f"cut at its limit of {limit:.0f} s{kept}"}
    elif result["status"] == "running":
        result["status"] = "failed"
        result["failures"] = [*result["failures"], {"part": name, "error": ended_early(code)}]
    if result["status"] != "ok":
        run.keep_log(name, result)
    log.unlink()
    return result


def ended_early(code: int) -> str:
    """Say how a process has ended."""
    cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"the process ended early: {cause}"


def waited(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Wait for a process; return its exit status, or None if it still runs."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def recorded(file: Path) -> dict[str, Any]:
    """Return what a section has recorded so far."""
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    return {"status": "running", "summary": "", "tables": {}, "failures": [], "left_out": []}


class Run:
    """Results of a run, in the folder that they are written to.

    Args:
        out: Folder of the results.
        facts: What else is known of the run.
    """

    def __init__(self, out: Path, facts: Mapping[str, Any]) -> None:
        self.work = environment.FOLDER / "sections"
        self.work.mkdir(parents=True)
        out.mkdir(parents=True, exist_ok=True)
        self._file, self._log = out / results.FILE, out / "failures.log"
        # Among the results, so that it is not lost if the whole run is killed.
        self.running_log = out / "running.log"
        for old in (self._log, self.running_log):
            old.unlink(missing_ok=True)
        self.sections: dict[str, dict[str, Any]] = {}
        self._facts = facts

    def keep(self, name: str, section: Mapping[str, Any]) -> None:
        """Write the results with those of a section."""
        self.sections[name] = dict(section)
        facts = {"format": results.FORMAT, **self._facts}
        results.write_json(self._file, facts | {"sections": self.sections})

    def keep_log(self, name: str, result: Mapping[str, Any]) -> None:
        """Add the end of the output of the section that ran last to the log of failures."""
        with self._log.open("ab") as file:
            room = max(0, min(LOG_TAIL, LOG_SIZE - file.tell()))
            head = f"==== {name}: {result['status']} {result.get('reason', '')}\n"
            output = self.running_log.read_bytes()
            file.write(head.encode() + output[max(0, len(output) - room) :] + b"\n")


def described(
    arguments: argparse.Namespace, options: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return what `device.machine` says, in a process that can use the device.

    If that takes too long, the machine is called unknown.
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "device.machine", *options],
            env=dict(variables),
            cwd=environment.ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=DESCRIPTION_SECONDS,
        )
    except subprocess.TimeoutExpired:
        unknown: dict[str, Any] = {"name": "unknown", "versions": {}, "revision": None}
        return {"kind": arguments.device, **unknown, "copied_gb_per_second": None}
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        sys.exit(f"torch of {sys.executable} cannot use the device {arguments.device!r}: {last}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command that repeats the run."""
    words = ["make device"]
    words += [f'SECTIONS="{arguments.sections}"'] if arguments.sections.strip() else []
    words += [f"DEVICE={arguments.device}"] if arguments.device != "cuda" else []
    words += ["SMALL=1"] if arguments.small else []
    words += [f"LIMIT={arguments.limit:g}"] if arguments.limit else []
    words += ["WHEELS=none"] if arguments.wheels is None else []
    return " ".join(words)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m device", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sections", default="", help="names; all of them by default")
    parser.add_argument("--limit", type=float, help="seconds for all sections together")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    return parser.parse_args()


def main() -> None:
    """Run the chosen sections. The exit status is 1 if one of them has failed."""
    started = time.monotonic()
    arguments = parse_arguments()
    try:
        names = plan.chosen(arguments.sections)
    except ValueError as error:
        sys.exit(str(error))
    # With the default action, the process of a section would outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    total = arguments.limit or plan.LIMITS[arguments.device]
    variables, wheels = environment.prepare(arguments.device, arguments.wheels)
    options = ["--device", arguments.device, *(["--small"] if arguments.small else [])]
    machine = described(arguments, options, variables)
    print(f"{machine['name']}, {machine['versions']}; wheels {wheels}", flush=True)
    facts = {
        "command": command_line(arguments),
        "date": results.now(),
        "small": arguments.small,
        "wheels": wheels,
        "machine": machine,
    }
    run = Run(Path(os.environ.get("OUT") or environment.ROOT / "build" / "device"), facts)
    for name, limit in plan.limits(names, total).items():
        left = total - (time.monotonic() - started)
        if left < plan.SMALLEST:
            reason = f"the whole run has a limit of {total:.0f} s"
            section = recorded(run.work / "none") | {"status": "not run", "reason": reason}
        else:
            command = [sys.executable, "-m", "device.section_process", name, *options]
            section = run_section(name, command, variables, min(limit, left), run)
        run.keep(name, section)
        seconds = f"{section.get('seconds', 0)} s"
        print(f"\n{name}: {section['status']} {section.get('reason', '')} ({seconds})")
        print(tables.tables(section), flush=True)
    print(f"\n{tables.overview(run.sections, names)}", flush=True)
    shutil.rmtree(environment.FOLDER / "tmp", ignore_errors=True)
    sys.exit(any(section["status"] == "failed" for section in run.sections.values()))
