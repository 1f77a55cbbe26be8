"""Faults that a run trains through, and the time that it would take on the network of its config.

The simulator (`fgd_jax.netsim`) plays the whole run once, at its start, with the exchanges and the bytes of the run's own
rounds. What fails there fails in training: exchanges that did not happen, workers that are down. Everything follows from the
config and its seeds, so a resumed run meets the same faults.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fgd_jax import config as configs
from fgd_jax import netsim
from fgd_jax.methods import Fragmented, Method
from fgd_jax.mixing import Mixer
from fgd_jax.round import Round

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Faults:
  """What happens to the rounds of a run, counted from 0.

  Attributes:
    method: bound.
    alive: bool [R, M], the workers that take part in a round.
    failures: exchanges that do not happen, by round.
    seconds: [R] simulated seconds from the start of the run to the end of a round.
    utilization: [R] share of them in which workers did inner steps that count.
  """

  method: Method
  alive: np.ndarray
  failures: dict[int, list[netsim.Failure]]
  seconds: np.ndarray
  utilization: np.ndarray

  def links(self, r: int) -> dict[str, np.ndarray]:
    """The links of round r, as `Round` takes them."""
    workers = self.alive.shape[1]
    tables: dict[str, np.ndarray] = {}
    for failure in self.failures.get(r, ()):
      mixer, event = self._exchange(failure.exchange)
      shape = (workers, workers) if event is None else (self.method.count, workers, workers)  # type: ignore[attr-defined]
      table = tables.setdefault(mixer.key, np.ones(shape, bool))
      table = table if event is None else table[event]
      if mixer.topology.bank[0].mean:
        table[:] = False
      else:
        i, j = failure.members
        table[i, j] = table[j, i] = False
    return tables

  def _exchange(self, name: str) -> tuple[Mixer, int | None]:
    """The mixer of an exchange of the simulator, and of fragments its number among those of a round."""
    if not isinstance(self.method, Fragmented):
      return getattr(self.method, name), None
    p = int(name.removeprefix("fragment "))
    blocks = self.method.blocks  # then fragment 0 departs at the end of a round
    return self.method.mix1, (p - 1) % self.method.count if blocks else p

  def rejoining(self, r: int) -> list[tuple[int, int]]:
    """(worker, donor) for each worker that is back in round r and has missed something.

    The donor is the next one of those that were there last; their states are the newest.
    """
    there = np.flatnonzero(self.alive[:r].any(axis=1))
    if not len(there):
      return []
    before, workers = self.alive[there[-1]], self.alive.shape[1]
    return [(int(m), next((m + i) % workers for i in range(1, workers) if before[(m + i) % workers]))
            for m in map(int, np.flatnonzero(self.alive[r] & ~before))]

  def record(self, r: int) -> dict[str, Any]:
    """What metrics.jsonl says of round r."""
    return {"simulated_seconds": float(self.seconds[r]), "compute_utilization": float(self.utilization[r]),
            "failed_exchanges": len(self.failures.get(r, ())), "workers_alive": int(self.alive[r].sum())}

  def events(self, r: int, steps: int) -> list[dict[str, Any]]:
    """Workers that go down in round r, or are back, for events.jsonl."""
    before = self.alive[r - 1] if r else np.ones(self.alive.shape[1], bool)
    base = {"round": r + 1, "step": r * steps}
    donors = dict(self.rejoining(r))
    return ([{**base, "event": "down", "worker": int(m), "cause": "crash"} for m in np.flatnonzero(before & ~self.alive[r])]
            + [{**base, "event": "back", "worker": int(m), "donor": donors.get(int(m))}
               for m in np.flatnonzero(~before & self.alive[r])])

  def describe(self) -> str:
    """What happens in all, for the log."""
    failed, down = sum(map(len, self.failures.values())), int((~self.alive).sum())
    return (f"{self.seconds[-1]:,.1f} s for {len(self.seconds)} rounds, compute utilisation "
            f"{100 * self.utilization[-1]:.1f} %, {failed} exchanges fail, workers are down for {down} rounds in all.")


def simulate(config: ConfigDict, round_fn: Round, params: PyTree, batches: PyTree) -> Faults:
  """Plays the run of a config.

  Args:
    round_fn: of the run. params: shapes of all workers' parameters [M, ...]. batches: shapes of a round's.

  Raises:
    ValueError: an impossible fault or link, in one sentence that names the key.
  """
  method, faults, network = round_fn.method, config.faults, config.network
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
  plan = netsim.plan_of_method(config.method.name, method, config.workers, config.inner_steps,
                               round_fn.traffic(params, batches), one, network.transfer)
  model = configs.fault_model(config)
  seed = config.seed if faults.seed is None else faults.seed
  result = netsim.simulate(plan, *model, faults.on_crash, config.rounds, seed, traced_rounds=0)
  failures = collections.defaultdict(list)
  for failure in result.failures:
    failures[failure.round].append(failure)
  finished = np.isfinite(result.round_ends)
  if not finished.any():
    raise ValueError(f"faults.crash_every={faults.crash_every:g} s: no worker ever finishes a round; take rarer crashes.")
  ends = np.maximum.accumulate(np.nan_to_num(np.asarray(result.round_ends)))  # nobody's round ends with the one before
  shares, took = np.nan_to_num(np.asarray(result.round_utilization)), np.diff(ends, prepend=0)
  return Faults(method, np.asarray(result.finished, bool), dict(failures), ends,
                np.cumsum(took * shares) / np.maximum(ends, 1e-300))
