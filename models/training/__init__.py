"""The training step, its loop, and resumption."""
