"""Who takes part: each wraps the pure code of its service and does for it what its shell does."""
