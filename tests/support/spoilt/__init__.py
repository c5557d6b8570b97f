"""Networks and trainings with planted faults."""
