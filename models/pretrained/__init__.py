"""Loading Hugging Face checkpoints onto a mesh, and saving them."""
