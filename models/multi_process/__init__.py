"""Rendezvous, monitoring and straggler detection for multi-process runs."""
