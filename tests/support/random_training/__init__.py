"""Random trainings, and an independent float64 reference of the contract for each of them."""
