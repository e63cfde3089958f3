"""CUDA graphs: which to capture, within a budget, and their capture and replay.

Every strategy's passes captured at every batch size cost more memory than there is (TLT, arXiv 2511.16665, "bucketed
CUDA graph capture": 30.4 GB for four strategies, 10.7 GB bucketed). So a graph is captured only for a batch size at
which its strategy can be chosen; passes of one shape are one graph, whichever strategies they serve (a chain, a tree
and an n-gram step that verify as many tokens; decoding is verifying none); and all graphs work in one pool of memory,
which takes what the largest one needs, since no two run at once.
Shapes: B = running answers, W = tokens a row in a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tlt_pipeline.engine.strategies import OFF, Strategy
from tlt_pipeline.models.decoder import DecoderConfig

Stage = Literal["verify", "draft"]
Tensors = tuple[Tensor, ...]
Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Work that always reads and writes the same memory -> what does it again."""
Eager = Literal["not_captured", "over_budget", "not_planned"]
"""Why a pass ran as it is: no GPU to capture on, no memory for it, or nobody expected it."""

KERNELS_PER_LAYER = 16
NODE_BYTES = 16 << 10
"""Device memory that a captured kernel takes, about; `CapturedGraphs.measured_bytes` says what all of it came to."""
WARM_UPS = 2


@dataclass(frozen=True)
class GraphKey:
    """A pass of `width` tokens a row for up to `batch` rows."""

    stage: Stage
    batch: int
    width: int

    @property
    def rows(self) -> int:
        return self.batch * self.width


@dataclass(frozen=True)
class GraphLimits:
    """`max_batch`: running answers at most; `max_speculating`: of them, with speculation; `max_rows`: tokens that one
    pass may verify, beyond which speculation is in vain; `budget_bytes`: for all graphs together."""

    max_batch: int
    max_speculating: int
    max_rows: int
    budget_bytes: int

    def allow(self, strategy: Strategy, batch: int) -> bool:
        """May that strategy be chosen at that batch size, one of `batch_buckets`?"""
        return not strategy.depth or (batch <= self.max_speculating and batch * (1 + strategy.verify) <= self.max_rows)


@dataclass(frozen=True)
class GraphCosts:
    """Bytes: `fixed` a graph, whatever it reads; `per_row` of activations for each token read. A pass's own inputs and
    outputs come on top, once for all graphs of a stage."""

    fixed: int
    per_row: int


@dataclass(frozen=True)
class GraphPlan:
    """`keys` in the order of capture: the largest first, so that the others fit into its memory. `left_out`: graphs
    that would be of use and go beyond the budget. `estimated_bytes`: what `keys` take, by the costs given."""

    keys: tuple[GraphKey, ...]
    left_out: tuple[GraphKey, ...]
    estimated_bytes: int


def estimate_costs(config: DecoderConfig, itemsize: int, context: int) -> dict[Stage, GraphCosts]:
    """From the policy's dimensions, bytes of one number, and the KV length that attention sees. What lives at once is
    the residual stream and either an MLP's or the head's tensors: logits, and three more of float32 to draw from."""
    hidden, vocab = config.hidden_size, config.vocab_size
    mask = config.num_heads // config.num_kv_heads * context
    layer = (2 * hidden + 4 * config.intermediate_size + mask) * itemsize
    per_row = max(layer, hidden * itemsize + vocab * (itemsize + 3 * 4))
    node_layer = KERNELS_PER_LAYER * NODE_BYTES
    return {
        "verify": GraphCosts((config.num_layers + 1) * node_layer, per_row),
        "draft": GraphCosts(2 * node_layer, per_row),
    }


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes to capture for, ascending: powers of two, and the largest there is."""
    powers = (1 << bits for bits in range(max_batch.bit_length()))
    return (*(size for size in powers if size < max_batch), max_batch)


def graphs_of(strategy: Strategy, batch: int) -> set[GraphKey]:
    """The passes of one step. A drafter's first one reads what the step before committed, at most depth + 1 tokens a
    row; a tree's others one token for each of the level's `top_k` nodes."""
    made = strategy.top_k + (strategy.depth - 1) * strategy.top_k**2  # a small tree may have fewer nodes than wanted
    keys = {GraphKey("verify", batch, 1 + min(strategy.verify, made))}
    if strategy.drafter == "eagle":
        keys.add(GraphKey("draft", batch, strategy.depth + 1))
        if strategy.depth > 1:
            keys.add(GraphKey("draft", batch, strategy.top_k))
    return keys


def memory_of(keys: Collection[GraphKey], costs: Mapping[Stage, GraphCosts], *, one_pool: bool = True) -> int:
    """Bytes that these graphs take together; without `one_pool`, each with memory of its own."""
    activations = [key.rows * costs[key.stage].per_row for key in keys]
    fixed = sum(costs[key.stage].fixed for key in keys)
    return fixed + (max(activations, default=0) if one_pool else sum(activations))


def plan_graphs(strategies: Iterable[Strategy], limits: GraphLimits, costs: Mapping[Stage, GraphCosts]) -> GraphPlan:
    """What to capture. Where the budget is short the largest are left out: a launch costs the same for any size, so
    the smallest passes gain most, and the long tail runs in them."""
    wanted = {
        key
        for batch in batch_buckets(limits.max_batch)
        for strategy in {OFF, *strategies}
        if limits.allow(strategy, batch)
        for key in graphs_of(strategy, batch)
    }
    kept: list[GraphKey] = []
    left_out: list[GraphKey] = []
    for key in sorted(wanted, key=lambda key: (key.rows, key.batch, key.stage)):
        fits = memory_of([*kept, key], costs) <= limits.budget_bytes
        (kept if fits else left_out).append(key)
    return GraphPlan(tuple(reversed(kept)), tuple(left_out), memory_of(kept, costs))


@dataclass(frozen=True)
class Pass:
    """`run`: tensors [B, W, ...] and [B, ...], the first one [B, W, ...] -> tensors [B, ...]. It works on the device
    alone, always the same way for given shapes; row r of its inputs is row r of whatever it writes to, where rows from
    B on are free. `example`: inputs for (B, W) to capture with."""

    run: Callable[..., Tensors]
    example: Callable[[int, int], Tensors]


class CapturedGraphs:
    """The planned graphs. A pass goes through the smallest one that has room for its rows and the same width, and
    without one runs as it is, which is counted with its reason. Graphs hold the addresses of weights and caches: load
    new weights into the same tensors, or capture anew."""

    def __init__(self, plan: GraphPlan, passes: Mapping[Stage, Pass]) -> None:
        self._plan, self._passes = plan, passes
        self._graphs: dict[GraphKey, _Graph] = {}
        self._buffers: dict[tuple[Stage, str, int, torch.dtype], Tensor] = {}
        self.replayed: Counter[GraphKey] = Counter()
        self.eager: Counter[Eager] = Counter()
        self.measured_bytes = 0
        """Device memory that capturing took."""

    @torch.no_grad()
    def capture(self, record: Recorder | None = None) -> None:
        """Captures what was planned, as CUDA graphs, or with another recorder; nothing without a GPU or a recorder. The
        examples are read into the caches."""
        record = record or (_cuda_recorder() if torch.cuda.is_available() else None)
        if record is None:
            return
        before = _device_bytes()
        for key in self._plan.keys:
            self._graphs[key] = self._prepare(key, record)
        self.measured_bytes = _device_bytes() - before

    def run(self, stage: Stage, *inputs: Tensor) -> Tensors:
        """What `Pass.run` gives for these inputs. The result is overwritten by the next pass of that stage."""
        B, W = inputs[0].shape[:2]
        key = _smallest(self._graphs, stage, B, W)
        if key is None:
            self.eager[self._reason(stage, B, W)] += 1
            return self._passes[stage].run(*inputs)
        self.replayed[key] += 1
        graph = self._graphs[key]
        for target, value in zip(graph.inputs, inputs, strict=True):
            target[:B].copy_(value)
            target[B:].copy_(value[:1].expand_as(target[B:]))  # rows that nobody asks for: what a real one does
        graph.replay()
        return tuple(output[:B] for output in graph.outputs)

    def wider(self, stage: Stage, B: int, W: int) -> int:
        """The smallest width, W or more, for which there is a graph with room for B rows; W if there is none."""
        widths = (key.width for key in self._graphs if key.stage == stage and key.batch >= B and key.width >= W)
        return min(widths, default=W)

    def _prepare(self, key: GraphKey, record: Recorder) -> _Graph:
        run, example = self._passes[key.stage].run, self._passes[key.stage].example(key.batch, key.width)
        inputs = tuple(self._buffer(key.stage, "in", number, each).copy_(each) for number, each in enumerate(example))
        outputs = tuple(self._buffer(key.stage, "out", number, each) for number, each in enumerate(run(*inputs)))

        def work() -> None:
            # copied out: the pool's memory belongs to whichever graph runs next
            for target, value in zip(outputs, run(*inputs), strict=True):
                target.copy_(value)

        return _Graph(inputs, outputs, record(work))

    def _buffer(self, stage: Stage, role: str, number: int, like: Tensor) -> Tensor:
        """Memory of that shape which all graphs of a stage share, outside of their pool."""
        place = (stage, role, number, like.dtype)
        known = self._buffers.get(place)
        if known is None or known.numel() < like.numel():
            known = self._buffers[place] = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        return known[: like.numel()].view(like.shape)

    def _reason(self, stage: Stage, B: int, W: int) -> Eager:
        if _smallest(self._plan.keys, stage, B, W) is not None:
            return "not_captured"
        return "not_planned" if _smallest(self._plan.left_out, stage, B, W) is None else "over_budget"


def _smallest(keys: Iterable[GraphKey], stage: Stage, B: int, W: int) -> GraphKey | None:
    """The graph of the stage with room for these rows, all of W tokens."""
    fitting = (key for key in keys if key.stage == stage and key.width == W and key.batch >= B)
    return min(fitting, key=lambda key: key.batch, default=None)


@dataclass(frozen=True)
class _Graph:
    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]


def _cuda_recorder() -> Recorder:
    """Records into CUDA graphs that share a pool."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # libraries set up what may not be set up in a capture
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay

    return record


def _device_bytes() -> int:
    """What is taken of the device's memory, cached blocks aside."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free
