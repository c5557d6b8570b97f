"""Show a training in a terminal and in a notebook."""
