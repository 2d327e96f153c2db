"""Streams that the driver feeds while the run goes on, through an input handle.

The handle's messages, to one shard each: `("data", epoch, payload)`,
`("advance", epoch)` and `("close",)`; `("stop", None)` comes when the run is drained.
Those of one handle arrive in their order; advancing and closing go to every shard.
For what was taken in, its bytes go back to the handle as credit.
"""

from __future__ import annotations

from typing import Any

from timelyml.errors import InvariantError
from timelyml.exchange import size_bytes
from timelyml.graph import GraphBuilder, Placement, StreamRef
from timelyml.operators.operator_builder import OperatorBuilder
from timelyml.operators.schema import SchemaLike, as_schema, declare, guard_maker
from timelyml.progress import Capability
from timelyml.runtime.operator import Logic
from timelyml.runtime.record import CREDIT_TAG
from timelyml.runtime.shard import Shard


def input(  # noqa: A001  what it is called wherever there are dataflows
    flow: GraphBuilder,
    *,
    num_shards: int | None = None,
    placement: Placement | None = None,
    schema: SchemaLike | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream that the driver sends records to, by `run.input(name)`.

    Args:
        flow: The dataflow.
        num_shards: Default: the dataflow's.
        placement: Which worker holds which shard.
        schema: Its columns; default: what it is sent first fixes them.
        name: What the driver asks for; default: "input".
    """
    builder = OperatorBuilder(
        flow,
        "input",
        name=name,
        is_source=True,
        states=("state",),
        num_shards=num_shards,
        placement=placement,
    )
    builder.add_output()
    declared = as_schema(schema)
    logic = Logic(
        on_start=_on_start,
        on_message=_on_message,
        make_check=guard_maker(f"input {name or 'input'!r}", declared),
    )
    (out,) = builder.build(logic)
    return declare(out, declared)


def _on_start(shard: Shard) -> None:
    if "capability" not in shard.state:  # it may be there, from elsewhere
        shard.state["capability"] = shard.initial_capability()


def _on_message(shard: Shard, body: tuple[Any, ...]) -> None:
    capability: Capability | None = shard.state.get("capability")
    if capability is None:
        return  # the run is being drained: what the driver still sent is too late
    match body:
        case ("data", int() as epoch, payload):
            shard.output().send(epoch, payload)
            shard.emit(CREDIT_TAG, size_bytes(payload))
        case ("advance", int() as epoch):
            capability.downgrade(epoch)
        case ("close",) | ("stop", _):
            shard.state["capability"] = None  # it is closed, wherever it goes
            capability.release()
        case _:
            raise InvariantError(
                f"input {shard.operator!r} got an unknown message; got {body[0]!r}; "
                f"expected data, advance, close or stop",
                operator=shard.operator,
            )
