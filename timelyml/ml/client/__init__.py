"""The client: slices, handles, and compiled functions that run on workers."""

from timelyml.ml.client.client import Client
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.local import local
from timelyml.ml.client.slices import Slice, SliceSharding

__all__ = ["Client", "Handle", "Slice", "SliceSharding", "local"]
