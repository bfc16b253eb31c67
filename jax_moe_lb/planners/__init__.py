"""Planners do the arithmetic of balancers: in C++ (`ffi/planning`) where it was built, else in jnp, with equal results.

A balancer calls them; call one yourself to plan on NumPy arrays without a program, or to write a balancer of your own.
"""
