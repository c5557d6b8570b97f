"""Write checkpoints that are complete or absent, and store the step's state in them."""
