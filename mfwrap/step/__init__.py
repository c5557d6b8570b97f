"""One training step, from micro-batches to updated weights; its public names are in `mfwrap`."""
