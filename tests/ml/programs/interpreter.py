"""Runs lowered programs on the devices of one process, host by host: an oracle.

Hosts share nothing but a table of messages. They take turns in an order drawn from a
seed, do what their own lists say, and keep what they were not told to release.
"""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from timelyml.ml.functions import Executables, partition_spec, put, to_host
from timelyml.ml.programs import Launch, Put, Receive, Release, Send


class Host:
    """One host: a place in its list, and the shards that it holds."""

    def __init__(self, name, instructions):
        self.name = name
        self.instructions = instructions
        self.position = 0
        self.held = {}  # slot -> shard -> array on its device

    @property
    def instruction(self):
        if self.position < len(self.instructions):
            return self.instructions[self.position]
        return None


class Interpreter:
    """Runs programs; what it compiled stays."""

    def __init__(self, devices, executables=None):
        self._devices = devices
        self._executables = executables or Executables()
        self.num_messages = 0
        self.num_bytes = 0

    def run(self, lowered, operands, seed=0):
        """Run a program on whole numpy arrays; return its results as such."""
        self._lowered = lowered
        self._hosts = {
            name: Host(name, lowered.for_host(name)) for name in lowered.hosts
        }
        self._messages = {}
        self._whole = dict(zip(lowered.args, operands, strict=True))
        for slot, data in lowered.constants.items():
            words = lowered.values[slot].type.physical
            self._whole[slot] = np.frombuffer(data, words.dtype).reshape(words.shape)
        for slot in lowered.args:
            if lowered.values[slot].slice is not None:
                self._put(slot, self._whole[slot])
        chance = random.Random(seed)
        while running := [h for h in self._hosts.values() if h.instruction]:
            chance.shuffle(running)
            did = [self._step(host) for host in running]  # each has its turn
            if not any(did):
                stuck = {host.name: host.instruction for host in running}
                raise AssertionError(f"hosts wait for each other: {stuck}")
        self._check_nothing_is_left()
        return [self._result(slot) for slot in lowered.results]

    def _step(self, host):
        """Do one instruction if it can be done; return whether it was."""
        instruction = host.instruction
        match instruction:
            case None:  # a launch by another was its last
                return False
            case Put():
                self._put(instruction.target, self._whole[instruction.source], host)
            case Send():
                self._send(instruction.move, host)
            case Receive():
                if not self._receive(instruction.move, host):
                    return False
            case Release():
                for slot in instruction.slots:
                    del host.held[slot]
            case Launch():
                place = self._lowered.places[instruction.slice]
                gang = [self._hosts[name] for name in place.shards_by_host]
                if any(each.instruction is not instruction for each in gang):
                    return False
                self._launch(instruction, place, gang)
                for each in gang:
                    each.position += 1
                return True
        host.position += 1
        return True

    def _place_of(self, slot):
        return self._lowered.places[self._lowered.values[slot].slice]

    def _put(self, slot, whole, host=None):
        place, layout = self._place_of(slot), self._lowered.layout(slot)
        for name, shards in place.shards_by_host.items():
            if host is None or host.name == name:
                self._hosts[name].held[slot] = {
                    shard: self._on_device(
                        at(whole, layout.index(layout.block_of(shard))), slot, shard
                    )
                    for shard in shards
                }

    def _on_device(self, words, slot, shard):
        """A shard, of its words: typed keys have a dimension more than their type."""
        array_type = self._lowered.values[slot].type
        shape = words.shape[: len(array_type.shape)]
        device = self._devices[self._place_of(slot).devices[shard]]
        return put(
            np.array(words),
            replace(array_type, shape=shape),
            SingleDeviceSharding(device),
        )

    def _send(self, number, host):
        move = self._lowered.moves[number]
        for other, pieces in move.pieces.sends(host.name).items():
            assert other != host.name
            arrays = self._taken(move, host, pieces)
            self._messages[number, host.name, other] = arrays
            self.num_messages += 1
            self.num_bytes += sum(array.nbytes for array in arrays)

    def _taken(self, move, host, pieces):
        return [
            at(to_host(host.held[move.source][piece.source]), piece.source_index)
            for piece in pieces
        ]

    def _receive(self, number, host):
        move = self._lowered.moves[number]
        expected = move.pieces.receives(host.name)
        if any(
            (number, other, host.name) not in self._messages
            for other in expected
            if other != host.name
        ):
            return False
        place, layout = self._place_of(move.target), self._lowered.layout(move.target)
        words = self._lowered.values[move.target].type.physical
        rest = words.shape[len(layout.shape) :]
        built = {}
        for shard in place.shards_by_host[host.name]:
            index = layout.index(layout.block_of(shard))
            shape = [stop - start for start, stop in index]
            built[shard] = np.full((*shape, *rest), 99, words.dtype)
        for other, pieces in expected.items():
            if other == host.name:
                arrays = self._taken(move, host, pieces)
            else:
                arrays = self._messages.pop((number, other, host.name))
            for piece, array in zip(pieces, arrays, strict=True):
                for shard in piece.targets:
                    at(built[shard], piece.target_index)[...] = array
        host.held[move.target] = {
            shard: self._on_device(array, move.target, shard)
            for shard, array in built.items()
        }
        return True

    def _launch(self, instruction, place, gang):
        computation = self._lowered.computations[instruction.computation]
        devices = [self._devices[name] for name in place.devices]
        executable = self._executables.load(computation, devices)
        arrays = []
        for slot, sharding in zip(
            instruction.operands, executable.in_shardings, strict=True
        ):
            shards = {}
            for host in gang:
                shards |= host.held[slot]
            parts = [shards[shard] for shard in sorted(shards)]
            shape = self._lowered.values[slot].type.shape
            arrays.append(
                jax.make_array_from_single_device_arrays(shape, sharding, parts)
            )
        for slot in instruction.donated:
            for host in gang:
                del host.held[slot]
        outputs = jax.block_until_ready(executable(*arrays))
        positions = {device: position for position, device in enumerate(devices)}
        for slot, output in zip(instruction.outputs, outputs, strict=True):
            for host in gang:
                host.held[slot] = {}
            for shard in output.addressable_shards:
                position = positions[shard.device]
                name = place.hosts[position]
                self._hosts[name].held[slot][position] = shard.data

    def _check_nothing_is_left(self):
        lowered = self._lowered
        assert self._messages == {}
        kept = set(lowered.results)
        for position, slot in enumerate(lowered.args):
            if position not in lowered.donated_args:
                kept.add(slot)
        for host in self._hosts.values():
            over = host.held.keys() - kept - set(lowered.args)
            assert not over, f"{host.name} keeps {over}"

    def _result(self, slot):
        value = self._lowered.values[slot]
        if value.slice is None:
            return np.asarray(self._whole[slot])
        place, layout = self._place_of(slot), self._lowered.layout(slot)
        words = value.type.physical
        whole = np.full(words.shape, 99, words.dtype)
        for host in self._hosts.values():
            for shard, array in host.held.get(slot, {}).items():
                at(whole, layout.index(layout.block_of(shard)))[...] = to_host(array)
        mesh = Mesh(
            np.array([self._devices[each] for each in place.devices]).reshape(
                layout.mesh.axis_sizes
            ),
            layout.mesh.axis_names,
        )
        sharding = NamedSharding(mesh, partition_spec(layout.spec))
        blocks = sharding.devices_indices_map(value.type.shape)
        for shard, device in enumerate(mesh.devices.flat):  # as JAX itself cuts it
            index = layout.index(layout.block_of(shard))
            for mine, theirs, length in zip(
                index, blocks[device], value.type.shape, strict=True
            ):
                assert slice(*mine).indices(length) == theirs.indices(length)
        return whole


def at(array, index):
    return array[(*(slice(*each) for each in index), ...)]
