"""Gradients of programs: differentiated call by call, on the slices of the calls."""

from timelyml.ml.gradients.api import grad, value_and_grad

__all__ = ["grad", "value_and_grad"]
