"""How weights and tokens move, by mechanism."""
