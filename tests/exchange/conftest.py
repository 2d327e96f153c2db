"""Hypothesis without deadlines: an example is not wrong for being slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
