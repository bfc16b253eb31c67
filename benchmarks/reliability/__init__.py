"""Inputs and faults tried on plans, layers, readers of files and training runs."""
