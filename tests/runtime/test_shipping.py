from __future__ import annotations

import sys
import threading
import types

import cloudpickle
import pytest

from timelyml.errors import ShippingError
from timelyml.graph import Exchange, GraphBuilder, InputSpec, Pipeline
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.operator import Logic
from timelyml.runtime.shipping import dumps, loads, ship, unship


def graph_of(logic, pact=None):
    builder = GraphBuilder("flow")
    (numbers,) = builder.add_operator(
        "numbers", "source", inputs=(), num_outputs=1, logic=Logic(), is_source=True
    )
    builder.add_operator(
        "work",
        "map",
        inputs=[InputSpec(numbers, pact or Pipeline())],
        num_outputs=1,
        logic=logic,
    )
    return builder.build()


def shipped(logic, pact=None):
    return ship(ShippedRun(graph_of(logic, pact), RunConfig()))


def test_a_worker_gets_its_own_copy_with_identities_kept_inside_it():
    shared = []
    logic = Logic(
        on_batch=lambda shard, delivery: shared.append(1),
        on_frontier=lambda shard: shared.append(2),
    )
    data = shipped(logic)
    copies = [unship(data).graph.operators[1].logic for _ in range(2)]
    copies[0].on_batch(None, None)
    copies[0].on_frontier(None)
    cells = [copy.on_batch.__closure__[0].cell_contents for copy in copies]
    assert cells == [[1, 2], []]
    assert shared == []


def test_what_cannot_be_shipped_is_named_with_operator_path_and_type():
    lock = threading.Lock()
    settings = {"retries": 3, "guards": [lock]}

    def on_batch(shard, delivery):
        return settings

    with pytest.raises(ShippingError, match="operator 'work' cannot be shipped") as got:
        shipped(Logic(on_batch=on_batch))
    assert got.value.path == "on_batch.settings['guards'][0]"
    assert got.value.type_name == "_thread.lock"


def test_an_attribute_of_a_callable_object_is_found_too():
    class Work:
        def __init__(self):
            self.handle = threading.Lock()

        def __call__(self, shard, delivery):
            return None

    with pytest.raises(ShippingError, match=r"_thread.lock at on_batch.handle"):
        shipped(Logic(on_batch=Work()))


def test_a_routing_function_that_cannot_be_shipped_names_its_channel():
    lock = threading.Lock()
    pact = Exchange(lambda payload, num_shards: lock)
    with pytest.raises(ShippingError, match="channel from 'numbers' to 'work'"):
        shipped(Logic(), pact)


def test_a_broken_reduce_of_the_user_is_an_error_that_names_the_operator():
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("never")

    stubborn = Stubborn()
    with pytest.raises(ShippingError, match="never") as got:
        shipped(Logic(on_start=lambda shard: stubborn))
    assert got.value.who == "operator 'work'"


def test_bytes_that_this_process_cannot_rebuild_say_what_is_missing():
    module = types.ModuleType("only_here")
    module.__spec__ = types.SimpleNamespace(name="only_here")
    exec("def on_start(shard):\n    return 1\n", module.__dict__)
    sys.modules["json.only_here"] = module
    module.__name__ = "json.only_here"
    module.on_start.__module__ = "json.only_here"
    try:
        data = shipped(Logic(on_start=module.on_start))
    finally:
        del sys.modules["json.only_here"]
    with pytest.raises(ShippingError, match=r"json.only_here"):
        unship(data)


def test_code_of_a_module_that_workers_cannot_import_travels_by_value():
    module = types.ModuleType("cell_module")
    exec("limit = 7\ndef on_start(shard):\n    return limit\n", module.__dict__)
    sys.modules["cell_module"] = module
    try:
        data = shipped(Logic(on_start=module.on_start))
    finally:
        del sys.modules["cell_module"]
    assert unship(data).graph.operators[1].logic.on_start(None) == 7


def test_bytes_that_are_no_run_are_refused():
    with pytest.raises(ShippingError, match="no dataflow"):
        unship(dumps([1, 2]))


def test_shipped_code_keeps_the_name_of_its_file():
    copy = loads(dumps(lambda: None))
    assert copy.__code__.co_filename == __file__


def test_threads_may_ship_code_of_the_same_module_at_once():
    module = types.ModuleType("of_no_file")
    exec("def double(x):\n    return 2 * x\n", vars(module))
    module.double.__module__ = "of_no_file"
    sys.modules["of_no_file"] = module
    barrier = threading.Barrier(4)
    failed = []

    def pickle_often():
        barrier.wait()
        try:
            for _ in range(200):
                assert b"of_no_file" in dumps(module.double)
        except ValueError as error:
            failed.append(error)

    threads = [threading.Thread(target=pickle_often) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        del sys.modules["of_no_file"]
    assert failed == []
    assert "of_no_file" not in cloudpickle.list_registry_pickle_by_value()


def test_a_module_that_the_user_registered_stays_registered():
    module = types.ModuleType("of_the_user")
    exec("def double(x):\n    return 2 * x\n", vars(module))
    module.double.__module__ = "of_the_user"
    sys.modules["of_the_user"] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        dumps(module.double)
        assert "of_the_user" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules["of_the_user"]
