"""What timelyml is measured by; run as `python -m benchmarks NAME [--json]`."""
