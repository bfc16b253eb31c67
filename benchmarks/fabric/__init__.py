"""Flow-level simulation of exchanges: flows sharing the links of a fabric."""
