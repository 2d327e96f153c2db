"""Ordinary JAX models whose labelled parts run on slices, as programs or in stages."""

from timelyml.ml.fragments.api import fragments, homes
from timelyml.ml.fragments.stages import NamedStages, named_stages

__all__ = ["NamedStages", "fragments", "homes", "named_stages"]
