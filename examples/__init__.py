"""Programs that use timelyml; run from a checkout, e.g. `python -m examples.moe_routing`."""
