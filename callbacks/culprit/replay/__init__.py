"""Run a bad step again, to find its module, micro-batch and rows."""
