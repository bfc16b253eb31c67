"""Programs compiled for absent accelerators."""
