"""Plans of balancers, without devices."""
