"""What a schedule means, by graphs: an order runs if and only if it has no cycle."""

from itertools import pairwise

import networkx as nx

from timelyml.ml.pipeline.actions import Action, Op, Row, Schedule

COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT)
BACK = (Op.BACKWARD, Op.INPUT)


def receive_of(action: Action, schedule: Schedule) -> Action | None:
    stage, mb, last = action.stage, action.microbatch, schedule.num_stages - 1
    homes = schedule.rank_of_stage
    if action.op is Op.FORWARD and stage and homes[stage - 1] != homes[stage]:
        return Action(stage, Op.RECV_F, mb)
    if action.op in BACK and stage < last and homes[stage + 1] != homes[stage]:
        return Action(stage, Op.RECV_B, mb)
    return None


def send_of(action: Action, schedule: Schedule) -> Action | None:
    stage, mb, last = action.stage, action.microbatch, schedule.num_stages - 1
    homes = schedule.rank_of_stage
    if action.op is Op.FORWARD and stage < last and homes[stage + 1] != homes[stage]:
        return Action(stage, Op.SEND_F, mb)
    if action.op in BACK and stage and homes[stage - 1] != homes[stage]:
        return Action(stage, Op.SEND_B, mb)
    return None


def just_in_time(schedule: Schedule) -> list[list[Row]]:
    """Return rows per rank: receives just before use, sends just after."""
    programs = []
    for rank in schedule.rows:
        program = []
        for action in (action for row in rank for action in row):
            around = receive_of(action, schedule), action, send_of(action, schedule)
            program += [(a,) for a in around if a is not None]
        programs.append(program)
    return programs


def matching_receive(send: Action) -> Action:
    if send.op is Op.SEND_F:
        return Action(send.stage + 1, Op.RECV_F, send.microbatch)
    return Action(send.stage - 1, Op.RECV_B, send.microbatch)


def sends_by_channel(schedule, programs, shared):
    """Map each channel to the receives that it serves, in the order of its sends."""
    channels = {}
    for rank, program in enumerate(programs):
        for action in (action for row in program for action in row):
            if action.op in (Op.SEND_F, Op.SEND_B):
                receive = matching_receive(action)
                edge = action.stage, receive.stage
                key = (rank, schedule.rank_of_stage[receive.stage]) if shared else edge
                channels.setdefault(key, []).append((action, receive))
    return channels


def event_graph(schedule, programs, depth, shared, *, duration=lambda _: 0, latency=0):
    """Return the graph of rows and what each waits for, or None if the order clashes.

    Row `i` of a rank comes before its row `i + 1`; message `n` of a channel is sent
    `latency` before it is taken, and taken before message `n + depth` is sent. Without
    a buffer a send and its receive are one event, which takes `latency`.
    """
    place = {
        action: (rank, index)
        for rank, program in enumerate(programs)
        for index, row in enumerate(program)
        for action in row
    }
    takes = {place[a]: duration(a) for a in place if a.op in COMPUTE}
    same = nx.utils.UnionFind(place.values())
    delays = []
    for rank, program in enumerate(programs):
        nodes = [(rank, index) for index in range(len(program))]
        delays += [(before, after, 0) for before, after in pairwise(nodes)]
    for messages in sends_by_channel(schedule, programs, shared).values():
        places = [place[receive] for _, receive in messages]
        if places != sorted(places):
            return None  # some message stands before one that is wanted earlier
        for number, (send, receive) in enumerate(messages):
            if depth == 0:
                takes[place[send]] = takes[place[receive]] = latency
                same.union(place[send], place[receive])
            else:
                delays.append((place[send], place[receive], latency))
            if depth and number + depth < len(messages):
                delays.append((place[receive], place[messages[number + depth][0]], 0))
    graph = nx.DiGraph()
    for node in place.values():
        graph.add_node(same[node], takes=takes.get(node, 0))
    for before, after, delay in delays:
        edge = same[before], same[after]
        old = graph.get_edge_data(*edge, {"delay": 0})["delay"]
        graph.add_edge(*edge, delay=max(old, delay))
    return graph


def runs_to_the_end(schedule: Schedule, programs, depth, shared) -> bool:
    """Whether blocking receives and sends over FIFOs of `depth` let every row run."""
    graph = event_graph(schedule, programs, depth, shared)
    return graph is not None and nx.is_directed_acyclic_graph(graph)


def last_end(graph) -> float:
    """Return the longest way through a graph of events."""
    ends = {}
    for node in nx.topological_sort(graph):
        starts = [
            ends[before] + graph.edges[before, node]["delay"]
            for before in graph.predecessors(node)
        ]
        ends[node] = max(starts, default=0) + graph.nodes[node]["takes"]
    return max(ends.values())


def critical_path(schedule: Schedule, cost_of, latency) -> float:
    """Return the longest way through computations: rank order and data."""
    graph = nx.DiGraph()
    maker = {}
    for rank in schedule.rows:
        for action in (action for row in rank for action in row):
            op = Op.INPUT if action.op is Op.BACKWARD else action.op
            maker[action.stage, op, action.microbatch] = action
    for rank in schedule.rows:
        actions = [action for row in rank for action in row]
        graph.add_nodes_from(actions)
        for before, after in pairwise(actions):
            graph.add_edge(before, after, delay=0)
    for action in list(graph):
        s, mb = action.stage, action.microbatch
        reads = {
            Op.FORWARD: [(s - 1, Op.FORWARD, mb)],
            Op.WEIGHT: [(s, Op.INPUT, mb)],
        }.get(action.op, [(s, Op.FORWARD, mb), (s + 1, Op.INPUT, mb)])
        for value in reads:
            if value in maker:
                homes = schedule.rank_of_stage
                is_sent = homes[value[0]] != homes[s]
                before = maker[value]
                old = graph.get_edge_data(before, action, {"delay": 0})["delay"]
                delay = max(old, latency if is_sent else 0)
                graph.add_edge(before, action, delay=delay)
    nx.set_node_attributes(graph, {a: cost_of(a) for a in graph}, "takes")
    return last_end(graph)
