"""Pure functions of arrays shared by two papers or more: no parameters, no Flax."""
