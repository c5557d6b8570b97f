"""Find what went wrong first in a bad step: module, rank, micro-batch and samples."""
