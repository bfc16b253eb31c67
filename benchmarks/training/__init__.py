"""Training and generation of language models."""
