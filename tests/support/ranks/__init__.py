"""What each of several processes does."""
