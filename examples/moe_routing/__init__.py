"""A mixture-of-experts language model whose experts are shards of a dataflow."""
