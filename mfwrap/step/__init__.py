"""One training step, from micro-batches to updated weights; import public names from `mfwrap`."""
