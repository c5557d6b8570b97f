"""Compute norms, group parameters, handle shards, and read tensors without stopping the host."""
