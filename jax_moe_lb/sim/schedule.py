"""Schedule of a simulated step: its tasks in the order of the library's executor (`layer/moe.py`).

A layer's forward pass has these stages:

- `attention`, including the router,
- `shared experts`, if any, in parallel with exchanges,
- `counts`, the all-gather of counts and the exchange of addresses,
- `plan`,
- `weights`, the replication of weights into slots,
- `dispatch`, the exchange of token copies,
- `experts`,
- `combine`, the exchange of outputs.

`gather`, the gather of expert domains, starts with the layer and overlaps with attention. With two waves, the first
wave starts without plan and weights and overlaps with both. In two phases, `dispatch` brings all copies to the homes of
the experts without a plan. `rows` sends some of them on from there, in parallel with weights and the first wave's
experts. `return` brings their outputs to the homes, and `combine` brings all outputs to the tokens.

The backward pass runs from the last layer to the first, and its stage names end with ` (backward)`. It exchanges
weights again, sends output gradients to the experts' ranks, runs the experts, and returns the gradients of tokens.
Attention follows, and overlaps with `gradients`: gradients of replicas and of gathered experts on the way home. If
the memory bandwidth is given, `permutation`, `sums of copies`, `joined weights`, `sums of replicas` (gradients of
replicas, and the split of joined gradients) and `sums of rounds` (gradients of overflow rounds) take time as well; see
`hbm.py`. `small operations` are sorts and addresses.
`other` is the rest of the step. Groups beside the expert-parallel one have stages of their own; see `model.py`.

Tasks run on the streams `compute`, `host` (the planner) and `copy` (copy engines). Each level has a stream of its own:
`dc links`, `node links` and `gpu links`. Other groups have `tensor links`, `data links` and `pipeline links`.
"""

import zlib
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.events import PerRank, Task, Timeline, Transfer
from jax_moe_lb.sim.hbm import empty_row_bytes, summed_in_loop
from jax_moe_lb.sim.model import ModelShape, Peers, Step
from jax_moe_lb.sim.network import Flow, busy_s, latency_s, level_seconds, seconds
from jax_moe_lb.sim.work import LayerWork, Wave

BACKWARD = " (backward)"
"""Suffix of the stage names of the backward pass."""

DATA_SUMS = "data sums" + BACKWARD


def _of_home(work: LayerWork) -> Wave:
    """Merge both waves of a layer in two phases into one wave of all rows at home."""
    first, second = work.waves
    gathered = first.gathered + second.gathered
    return replace(first, rows=np.hstack([first.rows, second.rows]), turns=None, gathered=gathered)


def _parts(flows: tuple[Flow, ...], chunks: int) -> tuple[Flow, ...]:
    return tuple(flow.times(1 / chunks) for flow in flows) if chunks > 1 else flows


@dataclass
class Scheduler:
    """Scheduler of the layers of one microbatch on a timeline."""

    model: ModelShape  # sizes of the layers
    cluster: Cluster  # machine with its rates
    step: Step  # passes of a step
    timeline: Timeline  # timeline that receives the tasks
    is_last: bool = True  # true (default) for the last microbatch of a step, whose end completes the gradients

    def run(self, layers: list[LayerWork]) -> None:
        """Add the forward pass of all layers and, if the step has one, the backward pass; then solve the timeline."""
        ready: tuple[Task, ...] = ()
        part = max(1, len(layers) // self.step.parallel.interleave)
        for at, work in enumerate(layers):
            ready = self._from_stage("", at, ready, at % part == 0)
            ready = self._tensor_sum("", at, self._forward(work, at, ready))
        if self.step.backward:
            for at in reversed(range(len(layers))):
                ready = self._from_stage(BACKWARD, at, ready, (at + 1) % part == 0)
                ready = self._backward(layers[at], at, ready)
        if self.model.other_s and self.is_last:
            summed = [task for task in self.timeline.tasks if task.stage == DATA_SUMS][-1:]
            self.timeline.add(
                Task("other", ("compute",), self.model.other_s), (*ready, *summed, *self.timeline.tasks[-1:])
            )
        self.timeline.solve()

    def _forward(self, work: LayerWork, at: int, ready: tuple[Task, ...]) -> tuple[Task, ...]:
        if work.passes_home:
            return self._forward_in_phases(work, at, ready)
        routed = self._attention(at, ready)
        held = self._exchanges("gather", work.gather, at, ready)
        if work.early:
            held += self._weights("weights", work, at, ready)
        counted = (routed, *self._exchanges("counts", self._if_counted(*work.counts), at, (routed,)))
        planned = counted
        if work.planner_s:
            # The planner runs on the host, in parallel with compute.
            planned = (self.timeline.add(Task("plan", ("host",), work.planner_s, at), counted),)
        served, last = tuple[Task, ...](), work.waves[-1]
        if len(work.waves) > 1:
            # The first wave needs neither plan nor weights; the weights travel during its experts.
            sent = self._dispatch("dispatch", work.waves[0], at, counted)
        # So do the first exchanges of some dispatches.
        begun = self._begin(last, at, counted)
        if not work.early:
            held += self._weights("weights", work, at, planned)
        if len(work.waves) > 1:
            _, served = self._serve("", work.waves[0], at, sent, 1.0)
        told = self._exchanges("counts", self._if_counted(work.address), at, (*planned, *served))
        ready = (*planned, *served, *told)
        if begun:
            sent = self._in_chunks(
                "dispatch", last.dispatch[last.early :], at, [(*ready, *one) for one in begun], last.rounds
            )
        else:
            sent = self._dispatch("dispatch", last, at, ready)
        return self._serve("", last, at, (*sent, *held), 1.0)[1]

    def _forward_in_phases(self, work: LayerWork, at: int, ready: tuple[Task, ...]) -> tuple[Task, ...]:
        routed = self._attention(at, ready)
        held = self._exchanges("gather", work.gather, at, ready)
        counted = (routed, *self._exchanges("counts", self._if_counted(*work.counts), at, (routed,)))
        # Addresses at home follow from the counts, so only the moved copies wait for the plan.
        told = self._exchanges("counts", self._if_counted(work.address), at, counted)
        planned = (self.timeline.add(Task("plan", ("host",), work.planner_s, at), counted),)
        first, second = work.waves
        sent = self._dispatch("dispatch", _of_home(work), at, (*counted, *told))
        held += self._weights("weights", work, at, (*planned, *sent))
        held += self._exchanges("rows", second.dispatch, at, (*planned, *sent), work.engine, second.rounds)
        at_home = self._experts("", first, at, sent, 1.0)
        return self._home_and_back("", work, at, self._experts("", second, at, (*at_home, *held), 1.0))

    def _backward_in_phases(
        self, work: LayerWork, at: int, ready: tuple[Task, ...], held: tuple[Task, ...], factor: float, sends: int
    ) -> tuple[Task, ...]:
        first, second = work.waves
        sent = self._dispatch("dispatch" + BACKWARD, _of_home(work), at, ready, sends)
        held += self._weights("weights" + BACKWARD, work, at, ready)
        onward = second.gradients_out(sends - 1)
        held += self._exchanges(
            "rows" + BACKWARD, onward, at, sent, work.engine, self._messages(BACKWARD, second, sends)
        )
        at_home = self._experts(BACKWARD, first, at, sent, factor)
        served = self._experts(BACKWARD, second, at, (*at_home, *held), factor)
        return self._after_experts(work, at, served, self._home_and_back(BACKWARD, work, at, served))

    def _home_and_back(self, mark: str, work: LayerWork, at: int, served: tuple[Task, ...]) -> tuple[Task, ...]:
        """Add the return of moved rows to the homes, and of all rows to the tokens."""
        first, second = work.waves
        home = second.gradients_back if mark else second.back
        messages = self._messages(mark, second, 1)
        at_home = self._exchanges("return" + mark, home, at, served, work.engine, messages) or served
        back, messages = first.gradients_back if mark else first.back, self._messages(mark, first, 1)
        done = self._exchanges("combine" + mark, back, at, (*served, *at_home), messages=messages) or at_home
        return self._sums_of_tokens(mark, _of_home(work), at, done)

    def _backward(self, work: LayerWork, at: int, ready: tuple[Task, ...]) -> tuple[Task, ...]:
        held = self._exchanges("gather" + BACKWARD, work.gather if work.gather_again else (), at, ready)
        # Time of the experts over that of the forward pass, and exchanges of rows to them: token copies sent again
        # travel beside the gradients of their outputs.
        factor, sends = self.cluster.backward_factor - (not self.step.recompute), 1 + self.step.recompute
        self._shared(BACKWARD, at, ready, factor)
        if work.passes_home:
            return self._backward_in_phases(work, at, ready, held, factor, sends)
        back = ready
        for wave in work.waves[:-1]:
            sent = self._dispatch("dispatch" + BACKWARD, wave, at, back, sends)
            held += self._weights("weights" + BACKWARD, work, at, ready)
            _, back = self._serve(BACKWARD, wave, at, sent, factor)
        if len(work.waves) == 1:
            held += self._weights("weights" + BACKWARD, work, at, ready)
        sent = self._dispatch("dispatch" + BACKWARD, work.waves[-1], at, back, sends)
        return self._after_experts(work, at, *self._serve(BACKWARD, work.waves[-1], at, (*sent, *held), factor))

    def _after_experts(
        self, work: LayerWork, at: int, served: tuple[Task, ...], back: tuple[Task, ...]
    ) -> tuple[Task, ...]:
        """Add the backward pass of attention, overlapped with gradients of replicas and gathered experts."""
        home: tuple[Task, ...] = ()
        if work.return_home is not None:
            home = self._exchanges("gradients" + BACKWARD, (work.return_home,), at, served, work.engine)
        home += self._exchanges("gradients" + BACKWARD, work.gather_home, at, served)
        if work.arriving:
            self._in_memory("sums of replicas" + BACKWARD, work.arriving, at, served)
        if work.rounds > 1:
            nbytes = summed_in_loop(float(work.waves[-1].rows.shape[1] * self.model.expert_bytes), self.model)
            self._in_memory("sums of rounds" + BACKWARD, (work.rounds - 1) * nbytes, at, served)
        self._data_sum(at, (*served, *home))
        # A backward pass has two products per product of the forward pass.
        before_s = 2 * self.model.before_experts_s(self.cluster)
        done = self._compute("attention" + BACKWARD, before_s, at, self._tensor_sum(BACKWARD, at, back))
        # All layers share the slots' memory, so the gradients must leave it before the next layer's arrive.
        return *self._tensor_sum(BACKWARD, at, (done,)), *home

    def _attention(self, at: int, ready: tuple[Task, ...]) -> Task:
        """Add attention with the router, and the shared experts, which overlap with exchanges."""
        before_s = self.model.before_experts_s(self.cluster)
        (routed,) = self._tensor_sum("", at, (self._compute("attention", before_s, at, ready),))
        self._shared("", at, (routed,), 1.0)
        return routed

    def _from_stage(self, mark: str, at: int, ready: tuple[Task, ...], begins: bool) -> tuple[Task, ...]:
        """Add the transfer of activations, or of the gradients, to the start of a pipeline part."""
        peers, num_bytes = self.step.parallel.pipeline, float(self.model.tokens * self.model.row_bytes)
        if peers.size == 1 or not begins:
            return ready
        return (self._beside("stages" + mark, "pipeline", peers.send_s(num_bytes), num_bytes, at, ready),)

    def _tensor_sum(self, mark: str, at: int, after: tuple[Task, ...]) -> tuple[Task, ...]:
        """Add the all-reduce over the tensor group, of all its tokens."""
        num_bytes = float(self.model.tokens * self.model.row_bytes)
        return self._sum("tensor sums" + mark, "tensor", self.step.parallel.tensor, num_bytes, at, after)

    def _data_sum(self, at: int, after: tuple[Task, ...]) -> None:
        """Add the all-reduce of the gradients of home experts; only the end of the step waits for it."""
        if self.is_last:
            num_bytes = float(self.model.experts // self.cluster.num_ranks * self.model.expert_gradient_bytes)
            self._sum(DATA_SUMS, "data", self.step.parallel.data, num_bytes, at, after)

    def _sum(
        self, stage: str, links: str, peers: Peers, num_bytes: float, at: int, after: tuple[Task, ...]
    ) -> tuple[Task, ...]:
        if peers.size == 1 or not after:
            return after
        return (self._beside(stage, links, peers.sum_s(num_bytes), peers.sent_in_sum(num_bytes), at, after),)

    def _beside(
        self, stage: str, links: str, seconds: float, rank_bytes: float, at: int, after: tuple[Task, ...]
    ) -> Task:
        """Add an exchange with ranks of other groups; all ranks start it together."""
        return self.timeline.add(
            Task(stage, (f"{links} links",), seconds, at, together=True, rank_bytes=rank_bytes), after
        )

    def _shared(self, mark: str, at: int, after: tuple[Task, ...], factor: float) -> None:
        if self.model.shared_inner:
            rows = np.array([[self.model.tokens]])
            shared_s = self.cluster.gemm.seconds(rows, factor * self.model.shared_flops)
            self._compute("shared experts" + mark, shared_s, at, after)

    def _if_counted(self, *flows: Flow) -> tuple[Flow, ...]:
        return flows if self.step.exchange_counts else ()

    def _weights(self, stage: str, work: LayerWork, at: int, after: tuple[Task, ...]) -> tuple[Task, ...]:
        held = () if work.replicate is None else self._exchanges(stage, (work.replicate,), at, after, work.engine)
        if not work.joins:
            return held
        # Shapes are static, so empty slots are joined, too.
        held = held or after
        weights_bytes = float(work.waves[-1].rows.shape[1] * self.model.expert_bytes)
        mark = BACKWARD if stage.endswith(BACKWARD) else ""
        return self._in_memory("joined weights" + mark, 2 * weights_bytes, at, held)

    def _in_memory(self, stage: str, num_bytes: float, at: int, after: tuple[Task, ...]) -> tuple[Task, ...]:
        """Add a task that moves bytes in a rank's own memory, if its bandwidth is given."""
        rate = self.cluster.hbm_bytes_per_s
        return (self._compute(stage, num_bytes / rate, at, after),) if rate and after else after

    def _dispatch(self, stage: str, wave: Wave, at: int, after: tuple[Task, ...], sends: int = 0) -> tuple[Task, ...]:
        """Add the exchange to the experts: tokens if `sends` is 0, else gradients, with tokens if `sends` is 2."""
        flows = wave.gradients_out(sends - 1) if sends else wave.dispatch
        mark, sends = BACKWARD if sends else "", max(sends, 1)
        after = self._permute(mark, wave, sends, at, after)
        if wave.chunks[0] > 1:
            return self._in_chunks(stage, flows, at, [after] * wave.chunks[0], sends * wave.rounds)
        return self._exchanges(stage, flows, at, after, messages=self._messages(mark, wave, sends)) or after

    def _messages(self, mark: str, wave: Wave, sends: int) -> int:
        """Return the exchanges of a wave: between processes on CPUs, weights of copies travel beside gradients."""
        return (sends + bool(mark and self.cluster.communication.padded)) * wave.rounds

    def _begin(self, wave: Wave, at: int, after: tuple[Task, ...]) -> list[tuple[Task, ...]]:
        """Add the exchanges of a dispatch that need no plan; return the last task per chunk."""
        if not wave.early:
            return []
        after = self._permute("", wave, 1, at, after)
        flows, chunks = wave.dispatch[: wave.early], wave.chunks[0]
        return [self._exchanges("dispatch", _parts(flows, chunks), at, after) or after for _ in range(chunks)]

    def _in_chunks(
        self, stage: str, flows: tuple[Flow, ...], at: int, after: list[tuple[Task, ...]], messages: int
    ) -> tuple[Task, ...]:
        """Add hops in chunks, each after its own tasks; return the last task of all chunks."""
        # Hops of different levels overlap: while a chunk is on its second hop, the next one is on its first.
        done: tuple[Task, ...] = ()
        parts = _parts(flows, len(after))
        for one in after:
            done = (*done, *(self._exchanges(stage, parts, at, one, messages=messages) or one))
        return done

    def _serve(
        self, mark: str, wave: Wave, at: int, after: tuple[Task, ...], factor: float
    ) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """Add the experts and the combine of a wave; return the last tasks of both."""
        computed = self._experts(mark, wave, at, after, factor)
        flows = wave.gradients_back if mark else wave.back
        messages = self._messages(mark, wave, 1)
        back = self._in_chunks("combine" + mark, flows, at, [computed] * wave.chunks[1], messages)
        return computed, self._sums_of_tokens(mark, wave, at, back)

    def _sums_of_tokens(self, mark: str, wave: Wave, at: int, after: tuple[Task, ...]) -> tuple[Task, ...]:
        summed = wave.gathered * self.model.row_bytes + float(self.model.tokens * self.model.row_bytes)
        return self._in_memory("sums of copies" + mark, summed, at, after)

    def _permute(self, mark: str, wave: Wave, sends: int, at: int, after: tuple[Task, ...]) -> tuple[Task, ...]:
        """Add the small operations of a wave, and the gathers of the rows, which every round repeats."""
        rounds, share = max(wave.rounds, 1), 2 / 3 if mark else 1 / 3
        if self.cluster.round_s and after:
            after = (self._compute("small operations" + mark, share * rounds * self.cluster.round_s, at, after),)
        # Each row is read and written.
        nbytes = 2 * wave.gathered * self.model.row_bytes
        return self._in_memory("permutation" + mark, sends * rounds * nbytes, at, after)

    def _experts(self, mark: str, wave: Wave, at: int, after: tuple[Task, ...], factor: float) -> tuple[Task, ...]:
        flops, gemm = factor * self.model.row_flops, self.cluster.gemm
        if wave.turns is None:
            experts_s = gemm.seconds(wave.rows, flops, max(wave.rounds, 1))
            if self.cluster.hbm_bytes_per_s:
                nbytes = empty_row_bytes(self.model, 2 if mark else 1)
                experts_s = experts_s + wave.empty * nbytes / self.cluster.hbm_bytes_per_s
        else:
            # All ranks wait for the slowest one after each turn.
            experts_s = np.full(len(wave.rows), sum(gemm.seconds(turn, flops).max() for turn in wave.turns))
        return (self._compute("experts" + mark, experts_s, at, after, wave.rows.sum(1)),)

    def _compute(
        self, stage: str, seconds: PerRank | float, at: int, after: tuple[Task, ...], rows: np.ndarray | None = None
    ) -> Task:
        """Add a compute task; jitter scales its duration on each rank, with mean 1."""
        deviation = self.cluster.jitter
        if deviation:
            # Seed by layer and stage, so that all systems get the same factors, regardless of their other tasks.
            rng = np.random.default_rng([self.cluster.jitter_seed, at, zlib.crc32(stage.encode())])
            seconds = seconds * rng.lognormal(-(deviation**2) / 2, deviation, self.timeline.num_ranks)
        return self.timeline.add(Task(stage, ("compute",), seconds, at, rows=rows), after)

    def _exchanges(
        self,
        stage: str,
        flows: tuple[Flow, ...],
        at: int,
        after: tuple[Task, ...],
        engine: bool = False,
        messages: int = 1,
    ) -> tuple[Task, ...]:
        """Add flows in sequence; return the last task, or an empty tuple if no flow has bytes."""
        last: tuple[Task, ...] = ()
        # Between processes on CPUs, the thread of a rank sends and computes in turn.
        streams = ("compute",) if self.cluster.communication.padded else ("copy",) if engine else ()
        for flow in flows:
            if flow.is_empty:
                continue
            flow_s = seconds(flow, self.cluster, messages=messages, copy_engine=engine)
            transfer = self._transfer(flow, engine, messages)
            # Every rank of an exchange waits for all others, so it starts on all of them together.
            task = Task(stage, streams, flow_s, at, together=True, flow=flow, transfer=transfer)
            last = (self.timeline.add(task, last or after, self._links(flow)),)
        return last

    def _transfer(self, flow: Flow, engine: bool, messages: int) -> Transfer | None:
        if not self.cluster.communication.shares_links:
            return None
        busy = busy_s(flow, self.cluster, copy_engine=engine)
        # A rate limited by copy engines leaves capacity on the links.
        return Transfer(messages * latency_s(flow, self.cluster), busy, level_seconds(flow, self.cluster))

    def _links(self, flow: Flow) -> tuple[str, ...]:
        levels = zip(self.cluster.levels, flow.uses, strict=True)
        return tuple(f"{level.name} links" for level, is_used in levels if is_used)
