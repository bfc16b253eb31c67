"""Training steps compiled for absent clusters."""
