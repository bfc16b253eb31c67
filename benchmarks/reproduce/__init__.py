"""Run every benchmark; see `runs`."""
