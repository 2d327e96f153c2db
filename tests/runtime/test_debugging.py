"""Single-stepping with pdb through a flow in the calling process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runtime import scripts
from timelyml import Dataflow

PAGE = Path(__file__).parents[2] / "docs/debugging.md"

PROGRAM = """\
from timelyml import Dataflow


def double(n):
    m = n + n
    return m


def pick(shard, delivery):
    rows = delivery.payload
    shard.output().send(delivery.time, rows)


flow = Dataflow()
flow.source([3, 5]).map(double).unary(pick, name="pick").collect()
print("result", flow.run()["out"])
"""

BREAKPOINT = PROGRAM.replace("    m = n + n\n", "    breakpoint()\n    m = n + n\n")


def session(cwd, code, commands, argv=("program.py",)):
    """Run a program with a script of commands for its debugger; return what it said."""
    program = scripts.start(code, cwd=cwd, argv=argv, keep_stdin=True)
    program.stdin.write("\n".join([*commands, ""]))
    program.stdin.flush()
    program.stdin.close()
    program.stdin = None
    code, out, err = scripts.finish(program)
    assert (code, err) == (0, ""), (out, err)
    return out


def test_breakpoint_stops_in_the_users_function_and_steps_line_by_line(tmp_path):
    out = session(
        tmp_path,
        BREAKPOINT,
        # The first record: up to the breakpoint, over a line, a look, and on.
        ["p ('n', n)", "next", "p ('m', m)", "next", "continue", "p n", "continue"],
    )
    assert "-> m = n + n" in out  # the source is shown, though the code was shipped
    assert "('n', 3)" in out
    assert "-> return m" in out
    assert "('m', 6)" in out
    assert "--Return--" in out
    assert out.endswith("result [6, 10]\n")


def test_a_breakpoint_by_file_and_line_is_hit_in_shipped_code(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    out = session(
        tmp_path,
        PROGRAM,
        [
            "break program.py:11",
            "continue",
            "p (shard.operator, shard.index, delivery.time, rows)",
            "clear 1",
            "continue",
            "quit",
        ],
        argv=("-m", "pdb", "program.py"),
    )
    assert "program.py(11)pick()" in out
    assert "('pick', 0, 0, [6" in out
    assert "result [6, 10]" in out


def test_the_stack_leads_from_the_users_function_to_the_call_of_run(tmp_path):
    out = session(tmp_path, BREAKPOINT, ["where", "continue", "continue"])
    frames = re.findall(r"program\.py\(\d+\)(\S+)\(\)", out)
    assert frames[:3] == ["double", "<module>", "double"]  # the stop, then the stack


def test_quitting_the_debugger_ends_the_program(tmp_path):
    program = scripts.start(BREAKPOINT, cwd=tmp_path, keep_stdin=True)
    program.stdin.write("quit\n")
    program.stdin.close()
    program.stdin = None
    code, _, err = scripts.finish(program)
    assert code != 0
    assert "BdbQuit" in err


def test_busy_time_is_that_of_the_callbacks_and_not_of_waiting(cluster):
    def work(n):
        return sum(range(20_000))

    flow = Dataflow(num_shards=2)
    numbers = flow.input("numbers", num_shards=1)
    numbers.exchange(lambda n: n).map(work, name="work").map(str, name="rest").collect()
    with cluster.start(flow) as run:
        run.input("numbers").send(list(range(60)))
        run.input("numbers").flush()
        run.record.wait_until(lambda: False, 0.3)  # nothing to do: nobody is busy
    busy = {name: each["busy_s"] for name, each in run.metrics()["operators"].items()}

    assert busy["work"] > busy["rest"] > 0
    by_worker = run.metrics()["workers"].values()
    assert sum(
        each["operators"]["work"]["busy_s"] for each in by_worker
    ) == pytest.approx(busy["work"])


def test_the_program_of_the_page_names_the_busiest_operator_first(tmp_path):
    program = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)

    code, out, err = scripts.run(program, cwd=tmp_path)

    assert (code, err) == (0, "")
    assert out.split()[0] == "work"
    assert "20,000 records in" in out
