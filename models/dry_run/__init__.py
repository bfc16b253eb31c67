"""Training steps compiled ahead of time for clusters not present."""
