"""Bytewax and timelyml on the same work, data and connectors, each in fresh processes."""
