"""The monitor of memory."""
