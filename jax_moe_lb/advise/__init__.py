"""Search for the fastest system of a model on a cluster."""
