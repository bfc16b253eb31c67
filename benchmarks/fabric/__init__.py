"""Exchanges flow by flow: the links of a fabric shared among flows."""
