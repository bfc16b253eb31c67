"""One layer on virtual CPU devices."""
