"""Transports move weights and tokens; each module has the name of a mechanism, and not of a paper."""
