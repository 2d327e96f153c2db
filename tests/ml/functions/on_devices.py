"""Runs shipped computations on devices, and plain JAX beside them; a script.

Reads a pickle of pairs of a case's name and its computation, pickled by a process that
has none of these devices; prints, as JSON, what differs in any bit.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.ml.functions import cases
from timelyml.ml.functions import abstract_mesh, applied, load, put, to_host, trace


def as_words(value):
    if jax.numpy.issubdtype(jax.numpy.result_type(value), jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def shipped(computation, case):
    """Outputs of the computation on all devices."""
    executable = load(computation, jax.devices())
    leaves = jax.tree.leaves(traced_arguments(case))
    arrays = [
        put(as_words(leaf), array_type, sharding)
        for leaf, array_type, sharding in zip(
            leaves, computation.in_types, executable.in_shardings, strict=True
        )
    ]
    outputs = executable(*arrays)
    assert executable.check(outputs) is None
    placed = [each.sharding for each in outputs]
    assert all(
        a.is_equivalent_to(b, each.ndim)
        for a, b, each in zip(placed, executable.out_shardings, outputs, strict=True)
    )
    return outputs[: computation.num_results]


def is_known_again(computation, case, mesh):
    """Whether this process gives the function the same identity, as it should."""
    if computation.has_callbacks or computation.checks is not None:
        return True  # code and numbers of checks belong to the process that traced
    again = trace(
        case.fun, case.args(), mesh=mesh, settings=case.settings, options=case.options
    )
    return again.computation.identity == computation.identity


def traced_arguments(case):
    static = case.options.static_argnums or (1,) * bool(case.options.static_argnames)
    return [each for i, each in enumerate(case.args()) if i not in static]


def plain(case, mesh):
    """Outputs of plain JAX with the same mesh."""

    def sharding(spec):
        return spec if spec is None else NamedSharding(mesh, spec)

    def shardings(tree):
        return jax.tree.map(
            sharding,
            tree,
            is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
        )

    options = case.options
    fun = cases.checkify.checkify(case.fun) if case.fun is cases.guarded else case.fun
    with applied(case.settings), jax.set_mesh(mesh):
        jitted = jax.jit(
            fun,
            in_shardings=shardings(options.in_shardings),
            out_shardings=shardings(options.out_shardings),
            static_argnums=options.static_argnums or None,
            static_argnames=options.static_argnames or None,
            donate_argnums=options.donate_argnums,
        )
        result = jitted(*case.args())
    if case.fun is cases.guarded:
        result = result[1]
    return jax.tree.leaves(result)


def main():
    path, num_devices = Path(sys.argv[1]), int(sys.argv[2])
    devices = np.array(jax.devices())
    differing, renamed = {}, []
    for name, computation in pickle.loads(path.read_bytes()):
        case = cases.CASES[name]
        logical = case.mesh(num_devices)
        mesh = Mesh(
            devices.reshape(logical.axis_sizes),
            logical.axis_names,
            axis_types=abstract_mesh(logical).axis_types,
        )
        if not is_known_again(computation, case, logical):
            renamed.append(name)
        ours = [to_host(each) for each in shipped(computation, case)]
        expected = [to_host(each) for each in plain(case, mesh)]
        same = [
            a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in zip(ours, expected, strict=True)
        ]
        if not all(same):
            differing[name] = same
    found = {"differing": differing, "renamed": renamed}
    print(json.dumps({"devices": jax.device_count(), **found}))


if __name__ == "__main__":
    main()
