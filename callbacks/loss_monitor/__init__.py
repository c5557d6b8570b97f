"""The line that a run logs, and what it is computed from."""
