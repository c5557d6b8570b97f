"""MindSpore's own classes: its cells, loss-scale managers and scalers, and `Model`."""
