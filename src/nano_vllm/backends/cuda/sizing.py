"""The size of the cache, from what the device holds beside it once the model has run."""

from __future__ import annotations

import logging

from ...memory.machine import format_bytes
from ...memory.plan import Plan, settle
from . import warmup
from .graphs import MOST, Graphs, Shapes
from .memory import PIECE

log = logging.getLogger(__name__)
SAMPLE = 8  # graphs that are captured to see what one takes


def size_cache(session, plan: Plan, shapes: Shapes, usual: int) -> int:
    """Gives the cache what the budget leaves beside everything else, which has run on a small one. -> graphs at most.

    Args:
        session: without graphs.
        plan: as it was made before loading.
        usual: graphs that there will be for certain; with none there will be no others.
    """
    beside, most = session.held.total() - session.kv_bytes + PIECE, MOST
    if usual:
        session.held.graph = measure_graph(session, shapes)
        most = min(MOST, max(usual, plan.share.budget // 100 // session.held.graph))  # for others, a hundredth
        beside += most * session.held.graph
    settled = settle(plan, beside)
    if settled.num_blocks < plan.num_blocks:
        blocks = f"{settled.num_blocks:,}", f"{plan.num_blocks:,}"
        took = format_bytes(beside), format_bytes(plan.share.beside)
        log.warning("the cache has %s blocks, not %s: beside it the device holds %s, not %s", *blocks, *took)
    if settled.num_blocks != session.plan.num_blocks:
        session.allocate_cache(settled.num_blocks)
    session.plan = settled
    return most


def measure_graph(session, shapes: Shapes) -> int:
    """Bytes of the device that a captured step takes, from a few decode steps that have run as graphs: some of it is taken when a
    graph first runs."""
    sizes = [n for n in shapes.sizes if n <= session.plan.num_blocks]
    few = sizes[:: -(-len(sizes) // SAMPLE)]
    before, session.graphs = session.held.total(), Graphs(shapes, session.record)
    session.graphs.prepare(shapes.decode(n) for n in few)
    for n in few:
        session.submit(warmup.batch([1] * n, session.plan)).result()
    taken, session.graphs, session.drawn = session.held.total() - before, None, 0
    return -(-(taken + PIECE) // len(few))
