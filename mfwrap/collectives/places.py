"""Describe, for messages about ranks, where a thread is in the program, and lists of ranks."""

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_NUM_FRAMES = 4
_OWN_FOLDER = str(Path(__file__).parent)
_SKIPPED = ("/torch/", "/threading.py", "/contextlib.py", "<")


def main_thread_place() -> str:
    """Return where the main thread is, as `place_of` describes it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  (no public name)
    return "its end" if frame is None else place_of(frame)


def place_of(frame: FrameType | None) -> str:
    """Return the innermost frames outside of torch and `mfwrap.collectives`, the innermost first.

    Each frame is ``folder/file.py:line in function``. If the innermost of them called torch, the
    name of torch's function comes first.
    """
    called = ""
    frames: list[str] = []
    while frame is not None and len(frames) < _NUM_FRAMES:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not is_skipped(file):
            frames.append(f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} in {name}")
        elif not frames and "/torch/" in file and name != "wrapper":
            called = f"{name} called at "
        frame = frame.f_back
    return called + (" < ".join(frames) or "an unknown place")


def is_skipped(file: str) -> bool:
    """Return whether `place_of` leaves out the frames of a file."""
    return file.startswith(_OWN_FOLDER) or any(part in file for part in _SKIPPED)


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words: ``rank 3``, ``ranks 0 and 2``, ``ranks 0-3 and 7``."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words: list[str] = []
    for span in spans:
        words += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else [str(rank) for rank in span]
    *others, last = words
    text = f"{', '.join(others)} and {last}" if others else last
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
