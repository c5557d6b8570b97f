"""MindSpore's callbacks, for `Model`."""
