"""Programs that tests run on several ranks, and the pool of processes that runs them."""
