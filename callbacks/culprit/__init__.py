"""What went wrong first: which module, rank, micro-batch and sample."""
