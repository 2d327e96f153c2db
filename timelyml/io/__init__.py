"""Streams from and to what is outside: connectors in the shape of Bytewax's."""

from __future__ import annotations

from timelyml.io.bytewax_feed import bytewax
from timelyml.io.bytewax_sinks import write
from timelyml.io.bytewax_sources import read

__all__ = ["bytewax", "read", "write"]
