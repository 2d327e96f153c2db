"""The main of a Bytewax process: `python -m timelyml.io.bytewax_process`.

A fresh interpreter, started by the worker that it feeds. What Bytewax prints goes to
stderr, since it tells of its connections. By the end of stdin it learns that the
worker is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from timelyml.errors import ConfigError, PeerError
from timelyml.io.bytewax_boot import GuestBoot
from timelyml.io.bytewax_messages import Broken, Finished
from timelyml.io.bytewax_outlet import Outlet, OutletPartition, OutletSink
from timelyml.runtime.boot import endpoint_from_map
from timelyml.runtime.failure import pack_exception
from timelyml.runtime.shipping import loads

EXIT_ORPHANED = 3
EXIT_BROKEN = 1


def main() -> int:
    """Run the dataflow that the worker sent; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends this process
    boot = GuestBoot.from_line(sys.stdin.buffer.readline())
    build_bytes = sys.stdin.buffer.read(boot.num_build_bytes)
    sys.path[:] = boot.sys_path
    os.dup2(2, 1)
    threading.Thread(
        target=_exit_with_stdin, args=(boot,), name="timelyml-orphan", daemon=True
    ).start()
    outlet = Outlet(boot, endpoint_from_map(boot.host))
    try:
        _run(boot, outlet, build_bytes)
        outlet.tell(Finished())
    except PeerError as error:
        print(error, file=sys.stderr)  # noqa: T201  nobody else is left to be told
        return EXIT_ORPHANED
    except Exception as error:  # noqa: BLE001  whatever user code raises
        outlet.tell(_broken(error))
        return EXIT_BROKEN
    finally:
        outlet.close()
    return 0


def _run(boot: GuestBoot, outlet: Outlet, build_bytes: bytes) -> None:
    import bytewax.testing  # noqa: PLC0415  only this process has it

    engine: Any = bytewax.testing.cluster_main
    build = loads(build_bytes)
    flow = build_flow(build, boot, OutletSink(outlet, boot))
    interval = timedelta(seconds=boot.epoch_interval_s)
    engine(flow, boot.addresses, boot.process_index, epoch_interval=interval)


def build_flow(
    build: Callable[[Callable[[Any], None]], Any], boot: GuestBoot, sink: OutletSink
) -> Any:
    """Let the user build the dataflow; what is passed to `send` leads to the outlet.

    Raises:
        ConfigError: It sent no stream, or two; or it returned no dataflow.
    """
    import bytewax.operators as op  # noqa: PLC0415  only this process has it
    from bytewax.dataflow import Dataflow  # noqa: PLC0415
    from bytewax.outputs import (  # noqa: PLC0415
        FixedPartitionedSink,
        StatefulSinkPartition,
    )

    FixedPartitionedSink.register(OutletSink)  # the engine asks for subclasses
    StatefulSinkPartition.register(OutletPartition)
    num_sent = 0
    registered: Any = sink

    def send(stream: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 1:
            boxed = op.flat_map_batch("timelyml_box", stream, sink.box)
            stamped = op.inspect_debug("timelyml_stamp", boxed, sink.stamp)
            op.output("timelyml_send", stamped, registered)

    flow = build(send)
    if num_sent != 1 or not isinstance(flow, Dataflow):
        raise ConfigError(
            f"the build function of {boot.name!r} does not fit; got {num_sent} calls of "
            f"send and a {type(flow).__name__}; expected one call, with the stream that "
            f"leaves, and the bytewax Dataflow as result; merge several streams first"
        )
    return flow


def _broken(error: BaseException) -> Broken:
    """Describe a failure by what the user's code raised, below Bytewax's own errors."""
    step = str(error)
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = "".join(traceback.format_exception(root))
    packed = pack_exception(root.with_traceback(None))
    return Broken(step, packed, text)


def _exit_with_stdin(boot: GuestBoot) -> None:
    """Leave when the worker's end of stdin closes: it is done with us, or died."""
    # not sys.stdin: its lock, held here, would abort the interpreter's own exit
    while os.read(0, 4096):
        pass
    who = f"bytewax process {boot.process_index} of {boot.name!r}"
    os.write(2, f"{who} ends: the worker that it feeds is gone\n".encode())
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
