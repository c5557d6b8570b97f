"""A device without hardware, which finds the errors that a CPU forgives and CUDA does not.

On CUDA the host queues work on streams and runs ahead. Tests on a CPU cannot show that the host
reads a value too early, stops to wait, reuses memory that is still in use, or forgets to order two
streams. This package registers a device type, ``simulated``, that computes on the CPU at once, with
the same numbers, and checks what would be wrong if the work were done late:

- `clocks`: streams and events, with vector clocks. Two uses of memory on different streams must be
  ordered by an event or by the host. Memory that is freed must not be in use on a stream that the
  allocator does not know of (``record_stream``).
- `tensors`: tensors of the device. Each operator notes what it reads and writes, on which stream.
  Reads of the host, synchronizations and copies from or to memory that is not pinned are noted
  with the line that causes them.
- `pinned`: pinned host memory. A copy from the device arrives only when the host waits for it;
  until then the memory holds NaN, and reading it is a fault. So is writing to memory that is being
  copied.
- `allocator`: memory of the device as a caching allocator counts it, and its errors.
- `graphs`: graphs, which refuse in a capture what CUDA refuses, and replay the recorded operators
  from and into the memory of the capture.
- `device`: the device itself, what it has seen (`Device.watching`), and a capture without a graph
  (`Device.capturing`).

torch keeps one place for a device type of somebody else's, and it cannot be given back. So programs
that use the device run in a process of their own; `run` starts one.

What it cannot show: speed; numbers of CUDA's own kernels; faults inside autograd's and
DistributedDataParallel's own use of streams, which are in C++ and do not see the stand-ins for
``torch.Event`` and ``torch.Stream``; reads of pinned memory by pointer; and anything of more than
one device.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from support.programs import Program
from support.versions import needs

needs_backends = needs("torch", "2.11", "it lets no Python code be a device")
"""Mark of tests that use the device."""


def run(program: str, *arguments: str) -> Any:
    """Run a function in a process of its own, and return what it returned.

    Args:
        program: Name of a module and of a function in it, ``module:function``. The function gets
            the arguments and returns what JSON can hold.
        arguments: Arguments of the function.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        code = (
            "import importlib, json, pathlib, sys; "
            "module, function = sys.argv[1].split(':'); "
            "result = getattr(importlib.import_module(module), function)(*sys.argv[3:]); "
            "pathlib.Path(sys.argv[2]).write_text(json.dumps(result), encoding='utf-8')"
        )
        Program(code, program, answer, *arguments).end()
        return json.loads(answer.read_text(encoding="utf-8"))
