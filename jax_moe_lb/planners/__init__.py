"""Planning arithmetic: in C++ where it was built, else the same integers in jnp. Mirrors `ffi/planning`."""
