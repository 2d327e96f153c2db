"""The client: slices, handles, and compiled functions that run on workers."""

from timelyml.ml.client.client import Client
from timelyml.ml.client.gauge import MemoryGauge
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.islands import IslandOptions
from timelyml.ml.client.local import local
from timelyml.ml.client.remote import connect
from timelyml.ml.client.serving import Server, serve
from timelyml.ml.client.slices import Slice, SliceSharding
from timelyml.ml.client.tracing import DeviceTrace

__all__ = [
    "Client",
    "DeviceTrace",
    "Handle",
    "IslandOptions",
    "MemoryGauge",
    "Server",
    "Slice",
    "SliceSharding",
    "connect",
    "local",
    "serve",
]
