"""Plans with a clock instead of devices."""
