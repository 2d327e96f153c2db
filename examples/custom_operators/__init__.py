"""Three operators with exchanges of their own; docs/custom_operators.md explains them."""
