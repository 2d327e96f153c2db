"""Why one scheduler orders all launches of an island: with plain JAX, and without."""
