"""Classical graph algorithms as dataflows with loops: one in one loop, one in two."""
