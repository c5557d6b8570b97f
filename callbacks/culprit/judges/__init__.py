"""Judge each step, and some steps' weights and states, by the steps before, on the device."""
