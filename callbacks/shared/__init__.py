"""What several monitors need: numbers of a step, sizes, clocks, logs."""
