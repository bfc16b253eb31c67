"""Estimated time of one scheduled operation on a target, from rates and from the load of the layer."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jax_moe_lb.aot.flops import ProductForm
from jax_moe_lb.aot.load import LayerLoad
from jax_moe_lb.aot.schedule import PLANNER_KERNEL, ROW_KERNELS, ExchangeShape, Kind, ScheduledOperation
from jax_moe_lb.aot.targets import Gpu, Target
from jax_moe_lb.collectives.exchange_paths import ExchangePath
from jax_moe_lb.collectives.exchange_time import (
    Estimate,
    Machine,
    UpdateBytes,
    busiest_rank_bytes,
    collective_time,
    exchange_time,
)
from jax_moe_lb.core.device_rates import GpuRates, RecordedKernel, TpuRates, device_rates, recorded_tflops

TILE = 128
"""Rows and columns of a tile of a product; a group of rows ends with a whole tile."""

LEAST_FILLED = 0.5
"""Least share of the multiprocessors that a product fills: libraries split the sums of small products."""

RECORDED: dict[str, RecordedKernel] = {"mosaic": "Mosaic", "triton": "Triton", "hopper": "Hopper"}
"""Kernels with recorded rates, by the names in `ProductForm`."""

TIME_UNDER_LIMITS = 2.0
"""Ratio of the times of a planner under several limits and of one plan, assumed from `benchmarks.plans limits`."""

SKIPS_EMPTY = ("triton", "hopper", "pallas")
"""Kernels without results of empty slots."""

GATHER = ROW_KERNELS[0]
"""Kernel that gathers rows; the other one also sums them."""

COMMUNICATION = frozenset({Kind.EXCHANGE, Kind.COLLECTIVE, Kind.COPIES})
"""Kinds of operations that move data between devices."""


def rates_of(target: Target) -> GpuRates | TpuRates:
    """Return the rates of a target's device."""
    return device_rates(target.kind, "cuda" if target.platform == "cuda" else "tpu")


@dataclass(frozen=True, eq=False)
class OperationTime:
    """Estimator of the time of operations."""

    target: Target  # target of the program
    # Load of the layer; None if unknown, and then buffers count as full and exchanges as even
    load: LayerLoad | None = None

    @cached_property
    def machine(self) -> Machine:
        """Ranks and rates of the target."""
        shape, rates = self.target.shape, rates_of(self.target)
        if isinstance(rates, TpuRates):
            return Machine(rates, self.target.num_devices, self.target.torus)
        return Machine(rates, shape[1] * shape[2])

    def of(self, one: ScheduledOperation, i: int) -> Estimate:
        """Estimate the time of an operation other than a wait or a loop."""
        if one.kind is Kind.PLANNER:
            return self._planner(one)
        if one.kind is Kind.COPIES:
            return self._copies(one, i)
        if one.exchange is not None:
            return self._exchange(one, one.exchange, i)
        return self._kernel(one, i)

    def _planner(self, one: ScheduledOperation) -> Estimate:
        rates = self.machine.rates
        if not one.planned_ranks or not isinstance(rates, GpuRates):
            return Estimate(rates.planner, "host")
        known = sorted(rates.planner_kernel)
        seconds = np.interp(one.planned_ranks, known, [rates.planner_kernel[ranks] for ranks in known])
        # Above the measured sizes, in proportion to the ranks, as from 32 to 64.
        beyond = max(1.0, one.planned_ranks / known[-1]) * (TIME_UNDER_LIMITS if one.under_limits else 1.0)
        return Estimate(rates.start + beyond * float(seconds), "latency")

    def _kernel(self, one: ScheduledOperation, i: int) -> Estimate:
        device, rates = self.target.device, self.machine.rates
        if device is None:
            raise ValueError(f"target is {self.target.name}; expected a device with known memory bandwidth")
        flops, nbytes = self._work(one, i)
        works = [Estimate(nbytes / (device.bytes_per_s * rates.memory_share), "HBM")]
        if one.items and isinstance(rates, TpuRates):
            works.append(self._items(one, rates))
        if one.product is not None:
            works.append(Estimate(flops * one.product.padding / self._speed(one, one.product, i), "FLOPs"))
        found = max(works, key=lambda estimate: estimate.seconds)
        least = 0.0 if one.in_graph else rates.launch
        seconds = max(found.seconds + one.launches * rates.start, one.launches * least)
        return Estimate(seconds, found.bound if found.seconds >= seconds / 2 else "launch")

    def _items(self, one: ScheduledOperation, rates: TpuRates) -> Estimate:
        if one.name.startswith(PLANNER_KERNEL):
            return Estimate(one.items * self._filled() * rates.planned_vector * rates.cycle, "latency")
        a_row = rates.gathered_row if one.name.startswith(GATHER) else rates.summed_row
        return Estimate(one.items * a_row * rates.cycle, "rows")

    def _filled(self) -> float:
        # Share of the replica slots that the plan fills; all of them without a load.
        if self.load is None:
            return 1.0
        filled = self.load.plan.placement[:, self.load.plan.num_home :] >= 0
        return float(filled.sum() / max(filled.size, 1))

    def _work(self, one: ScheduledOperation, i: int) -> tuple[float, float]:
        """Return the operations and bytes of the busiest rank: a grouped product computes the rows that it serves."""
        form = one.product
        if form is None or form.kind == "dense" or self.load is None:
            return float(one.flops), float(one.nbytes)
        share = min(1.0, self._served(one, form, i) / max(form.rows, 1))
        weight_bytes = form.weight_bytes * self._written(form)
        return one.flops * share, weight_bytes + max(one.nbytes - form.weight_bytes, 0) * share

    def _written(self, form: ProductForm) -> float:
        """Return the share of the groups with a result on the rank with the most; kernels skip empty slots."""
        assert self.load is not None
        plan = self.load.plan
        first = {plan.slots: 0, plan.slots - plan.num_home: plan.num_home}.get(form.groups)
        if form.kind != "outer" or form.kernel not in SKIPS_EMPTY or first is None:
            return 1.0
        return float((plan.placement[:, first:] >= 0).sum(1).max() / form.groups)

    def _served(self, one: ScheduledOperation, form: ProductForm, i: int) -> float:
        """Return the rows of a grouped product on the busiest rank."""
        # Each group is rounded up to whole tiles, unless the rates by rows include the last one. On TPUs tiles begin at
        # multiples of their size, so groups share some, and each of them computes these.
        rows, rates = self._rows(one, i), self.machine.rates
        size, starts = TILE, np.zeros_like(rows)
        if isinstance(rates, TpuRates):
            size = rates.matrix_unit
            starts = (np.cumsum(rows, 1) - rows) % size
        computed = np.where(rows > 0, -(-(starts + rows) // size) * size, 0)
        return float((rows if self._by_rows(form) else computed).sum(1).max())

    def _rows(self, one: ScheduledOperation, i: int) -> np.ndarray:
        """Return the rows of the groups of all ranks; of two phases, of the rank with the most rows in a round."""
        assert self.load is not None
        rows = self.load.rows(i, one.wave or "all")
        if self.load.moved_on is None:
            return rows
        # Between two exchanges no rank waits for another one but for its copies, so one rank is the slowest in all
        # products of a round.
        return rows[[int(np.argmax(self.load.rows(i).sum(1)))]]

    def _by_rows(self, form: ProductForm) -> dict[int, float]:
        """Return the measured rates by the rows of a group; empty for kernels without them."""
        rates = self.machine.rates
        return rates.experts if isinstance(rates, GpuRates) and form.kernel == "triton" else {}

    def _share(self, one: ScheduledOperation, form: ProductForm, i: int) -> float:
        """Return the share of a kernel's rate at the rows of the groups."""
        curve = self._by_rows(form)
        if not curve:
            return 1.0
        rows = float(form.rows / form.groups)
        if self.load is not None:
            by_rank = self._rows(one, i)
            busiest = by_rank[int(np.argmax(by_rank.sum(1)))]
            rows = float(busiest.sum() / max(1, np.count_nonzero(busiest)))
        speeds = list(curve.values())
        return float(np.interp(rows, list(curve), speeds)) / max(speeds)

    def _speed(self, one: ScheduledOperation, form: ProductForm, i: int) -> float:
        rates, device = self.machine.rates, self.target.device
        if form.kind != "dense":
            capability = f"{device.compute_capability}.0" if isinstance(device, Gpu) else ""
            recorded = recorded_tflops(capability, form.kind, RECORDED.get(form.kernel), self.target.kind)
            return rates.grouped[form.kind] if recorded is None else 1e12 * recorded * self._share(one, form, i)
        speed = (rates.float32 if form.dtype in ("f32", "f64") else rates.dense) / form.passes
        if not isinstance(device, Gpu):
            return speed
        tiles = math.ceil(form.rows / TILE) * math.ceil(form.columns / TILE)
        waves = math.ceil(tiles / device.multiprocessors)
        return speed * max(tiles / (waves * device.multiprocessors), LEAST_FILLED)

    def _copies(self, one: ScheduledOperation, i: int) -> Estimate:
        """Return the time of peer copies: of weights or of rows, by the busiest rank."""
        rates, shape, load = self.machine.rates, one.exchange, self.load
        assert isinstance(rates, GpuRates)
        assert shape is not None
        nbytes = float(shape.nbytes)
        if load is not None:
            unit = shape.nbytes / shape.operand_rows
            if one.wave:
                slices = load.sent(len(load.waves) - 1, i)
            else:
                slices = load.replicas if shape.operand_rows == load.plan.num_home else load.replica_gradients
            # Both directions of an exchange have the same busiest rank.
            nbytes = unit * busiest_rank_bytes(slices.sum(2))
        fixed_s, copied_s = rates.host_wait if one.waits_for_host else rates.start, nbytes / rates.copy_engines
        return Estimate(fixed_s + copied_s, "host" if one.waits_for_host and fixed_s > copied_s else "link")

    def _exchange(self, one: ScheduledOperation, shape: ExchangeShape, i: int) -> Estimate:
        on = self._group(shape)
        if not shape.updates:
            crosses = self.target.num_domains > 1 and (shape.axes is None or shape.axes[:1] == ("node",))
            return collective_time(shape.kind, shape.nbytes, shape.num_ranks, crosses, on)
        row_bytes, path = max(1, shape.nbytes // max(shape.operand_rows, 1)), ExchangePath(shape.path)
        groups = self._in_groups(one, shape, i)
        times = (exchange_time(sent, path, row_bytes, shape.operand_rows, on) for sent in groups)
        return max(times, key=lambda estimate: estimate.seconds)

    def _in_groups(self, one: ScheduledOperation, shape: ExchangeShape, i: int) -> list[UpdateBytes]:
        """Return the bytes per update in every group of ranks; of one group if all groups are equal."""
        lists = self.load.lists if self.load else None
        if lists is not None and not one.stage.endswith("replicate"):
            hop = len(lists.hops) - 1 if "expert" in (shape.axes or ("expert",)) else 0
            if shape.num_ranks == lists.hops[hop].rows.shape[1]:
                is_back = one.stage.endswith("combine")
                found = lists.bytes_of(hop, i, shape.nbytes, shape.operand_rows, is_back=is_back)
                # The other updates of a list are empty.
                return [np.pad(sent, ((0, 0), (0, 0), (0, shape.updates - 1))) for sent in found]
        sent, size = self._sent(one, shape, i), shape.num_ranks
        if sent is None:
            return [self._even(shape)]
        # Replicas travel inside domains, whose ranks are consecutive.
        return [sent[first : first + size, first : first + size] for first in range(0, len(sent), size)]

    def _group(self, shape: ExchangeShape) -> Machine:
        """Return the machine of a group of ranks: those of an outer axis alone are in different domains."""
        machine = self.machine
        if shape.axes and self.target.num_domains > 1 and "expert" not in shape.axes:
            return Machine(machine.rates, 1, ())
        return machine

    def _even(self, shape: ExchangeShape) -> UpdateBytes:
        """Return the bytes of an even exchange of the smaller buffer."""
        nbytes = min(shape.nbytes, shape.result_bytes)
        slices = (shape.num_ranks, shape.num_ranks, shape.updates)
        return np.full(slices, nbytes // (shape.num_ranks * shape.updates), np.int64)

    def _sent(self, one: ScheduledOperation, shape: ExchangeShape, i: int) -> UpdateBytes | None:
        """Return the bytes per update under the load, of all ranks; None for an exchange of another form."""
        load, is_of_weights = self.load, one.stage.endswith("replicate")
        if load is None or shape.num_ranks not in (load.plan.num_ranks, load.plan.domain if is_of_weights else None):
            return None
        if is_of_weights:
            slices, unit = self._replicas(load, shape)
        else:
            wave = len(load.waves) - 1 if one.wave in ("rows_onward", "rows_back") else 0
            slices = load.sent(wave, i, by_rank=shape.updates == 1)
            is_back = one.stage.endswith("combine")
            # The program may view a row as several.
            chunks = 1 if one.wave else _chunks(load, shape, is_back)
            unit, rest = divmod(shape.nbytes * chunks, load.capacity) if is_back else divmod(shape.nbytes, load.copies)
            if rest:
                return None
            # As if the rows were spread evenly over the chunks.
            slices = -(-(slices.transpose(1, 0, 2) if is_back else slices) // chunks)
        if slices is None:
            return None
        fitted = _fitted(slices, shape.updates)
        return None if fitted is None else fitted * unit

    def _replicas(self, load: LayerLoad, shape: ExchangeShape) -> tuple[np.ndarray | None, int]:
        """Return the experts per update and the bytes of one: weights from home, or gradients to home."""
        home, slots = load.plan.num_home, load.replicas.shape[2]
        if not slots:
            return None, 0
        if shape.nbytes * slots == shape.result_bytes * home:
            return load.replicas, shape.nbytes // home
        if shape.result_bytes < shape.nbytes:
            # Weights that a rank sends, arranged by rank.
            return load.replicas, shape.result_bytes // slots
        return load.replica_gradients, shape.nbytes // slots


def _chunks(load: LayerLoad, shape: ExchangeShape, is_back: bool) -> int:
    """Return the number of exchanges of a round, by the rows of the buffers; 1 for exchanges of another form."""
    copies, buffer = (shape.result_bytes, shape.nbytes) if is_back else (shape.nbytes, shape.result_bytes)
    chunks, rest = divmod(load.capacity * copies, load.copies * max(buffer, 1))
    return 1 if rest else max(1, chunks)


def _fitted(slices: np.ndarray, updates: int) -> np.ndarray | None:
    """Return slices as the updates of a list: summed for one update per peer, else followed by empty ones."""
    if updates == 1:
        return slices.sum(2, keepdims=True)
    missing = updates - slices.shape[2]
    return None if missing < 0 else np.pad(slices, ((0, 0), (0, 0), (0, missing)))
