"""Each file says of one architecture what its `config.json` means, and where the tensors of its checkpoints belong."""
