"""Timely dataflow for machine learning."""
