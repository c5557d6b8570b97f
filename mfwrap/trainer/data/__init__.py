"""Follow the rows of a training: its position in them, those that are left out, and its batches."""
