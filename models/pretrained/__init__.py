"""These functions read checkpoints of Hugging Face onto a mesh, and write them."""
