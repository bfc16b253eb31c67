"""Rendezvous, monitoring and stragglers of several processes."""
