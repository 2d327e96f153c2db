"""The object store's decisions: who holds which buffer, and who gets memory when."""

from timelyml.ml.store.directory import Directory, Listing
from timelyml.ml.store.ledger import Ledger
from timelyml.ml.store.values import (
    Admit,
    Buffer,
    BufferState,
    Claim,
    Delete,
    Handle,
    Known,
    Refuse,
    Spill,
    StoreEffect,
    Vacant,
)

__all__ = [
    "Admit",
    "Buffer",
    "BufferState",
    "Claim",
    "Delete",
    "Directory",
    "Handle",
    "Known",
    "Ledger",
    "Listing",
    "Refuse",
    "Spill",
    "StoreEffect",
    "Vacant",
]
