"""Loads, tables and figures of papers: published and ours."""
