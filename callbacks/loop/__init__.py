"""Follow a loop of your own: its events, its records and its trackers."""
