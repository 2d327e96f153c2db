"""Streams from and to what is outside: files, and connectors in Bytewax's shape."""

from __future__ import annotations

from timelyml.io.bytewax_feed import bytewax
from timelyml.io.bytewax_sinks import write
from timelyml.io.bytewax_sources import read
from timelyml.io.files import read_csv, read_parquet, read_text

__all__ = ["bytewax", "read", "read_csv", "read_parquet", "read_text", "write"]
