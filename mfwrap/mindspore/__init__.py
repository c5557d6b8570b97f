"""MindSpore's gradients, loss scalers and loss scale managers. Public names are in `mfwrap`."""
