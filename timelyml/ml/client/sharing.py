"""Sharing values between clients: trees of handles under a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from timelyml.errors import HandleError
from timelyml.ml.client.handle import Handle, HandleOwner
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.client.slices import Slice, SliceOwner
from timelyml.ml.controller.messages import Opened, OpenedBuffer
from timelyml.runtime.shipping import dumps, loads


def taken_apart(
    name: str, tree: Any, client: HandleOwner
) -> tuple[tuple[int, ...], bytes]:
    """Return the buffers of a tree to be published, and how to put it together again.

    Raises:
        HandleError: The name is no string, or a leaf is no handle of this client that
            can still be used.
        ShippingError: The tree has parts that cannot be pickled.
    """
    if not isinstance(name, str):
        raise HandleError(
            f"a tree cannot be published; got {name!r} as its name; expected a str"
        )
    leaves, treedef = jax.tree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Handle) or leaf.client is not client:
            raise HandleError(
                f"a tree cannot be published; got {leaf!r:.200}; expected handles of this "
                f"client only; put arrays on a slice first"
            )
        leaf.check()
    # A tree of numbers: how JAX describes one does not pickle if it has own classes.
    structure = dumps(jax.tree.unflatten(treedef, range(len(leaves))))
    return tuple(leaf.buffer for leaf in leaves), structure


def numbers_of(tree: Any) -> tuple[int, ...]:
    """Return the buffers of a tree of handles.

    Raises:
        HandleError: A leaf is no handle.
    """
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if not isinstance(leaf, Handle):
            raise HandleError(
                f"a call cannot be cancelled; got {leaf!r:.200}; expected handles of its "
                f"results, or a tree of them"
            )
    return tuple(leaf.buffer for leaf in leaves)


def put_together(opened: Opened, handle_of: Callable[[OpenedBuffer], Handle]) -> Any:
    """Return the tree of handles that was published.

    Raises:
        ShippingError: A class of the tree cannot be imported here.
    """
    numbers = loads(opened.structure)
    return jax.tree.map(lambda number: handle_of(opened.buffers[number]), numbers)


def held(opened: OpenedBuffer, client: Any, inbox: Inbox) -> Handle:
    """Return the handle of a buffer that a client was given once more.

    If it has one already, that is it, and one time is given back.
    """
    found = inbox.get(opened.buffer)
    if found is not None and not found.is_deleted():
        client.release(opened.buffer)
        return found
    handle = Handle(
        client, opened.buffer, slice_of(opened, client), opened.type, opened.spec
    )
    inbox.add([handle])
    return handle


def slice_of(opened: OpenedBuffer, client: SliceOwner) -> Slice:
    """Return the slice that a buffer lies on, which may be another client's."""
    mesh = AbstractMesh(opened.axis_sizes, opened.axis_names)
    return Slice(
        opened.slice, mesh, opened.platform, opened.island, opened.devices, client
    )
