"""Data-parallel training over two islands, whose gradients cross while others are made."""
