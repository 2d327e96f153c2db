"""A Transformer in stages on slices, trained in the order of a pipeline schedule."""
