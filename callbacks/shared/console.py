"""What callbacks print, line by line."""

import sys

__all__ = ["print_line"]


def print_line(line: str) -> None:
    """Write a line to standard output, now.

    To whatever stands there at the moment of the call, as ``print`` does.
    """
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
