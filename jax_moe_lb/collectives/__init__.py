"""Exchanges of rows and expert weights between ranks."""
