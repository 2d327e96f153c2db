"""What a schedule means, by graphs: an order runs if and only if it has no cycle."""

from itertools import pairwise

import networkx as nx

from timelyml.ml.pipeline.actions import Action, Op, Row, Schedule

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


def runs_to_the_end(schedule: Schedule, programs, depth, shared) -> bool:
    """Whether blocking receives and sends over FIFOs of `depth` let every row run.

    Row `i` of a rank comes before its row `i + 1`; message `n` of a channel is sent
    before it is taken, and taken before message `n + depth` is sent. Without a buffer
    a send and its receive are one event.
    """
    place = {
        action: (rank, index)
        for rank, program in enumerate(programs)
        for index, row in enumerate(program)
        for action in row
    }
    graph = nx.DiGraph()
    for rank, program in enumerate(programs):
        nodes = [(rank, index) for index in range(len(program))]
        graph.add_nodes_from(nodes)
        graph.add_edges_from(pairwise(nodes))
    same = nx.utils.UnionFind(graph.nodes)
    for messages in sends_by_channel(schedule, programs, shared).values():
        wanted = sorted(place[receive] for _, receive in messages)
        if [place[receive] for _, receive in messages] != wanted:
            return False  # some message stands before one that is wanted earlier
        for number, (send, receive) in enumerate(messages):
            if depth == 0:
                same.union(place[send], place[receive])
            else:
                graph.add_edge(place[send], place[receive])
                if depth is not None and number + depth < len(messages):
                    graph.add_edge(place[receive], place[messages[number + depth][0]])
    merged = nx.DiGraph((same[a], same[b]) for a, b in graph.edges)
    return nx.is_directed_acyclic_graph(merged)


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
    ends = {}
    for action in nx.topological_sort(graph):
        starts = [
            ends[before] + graph.edges[before, action]["delay"]
            for before in graph.predecessors(action)
        ]
        ends[action] = max(starts, default=0) + cost_of(action)
    return max(ends.values())
