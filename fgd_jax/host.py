"""The host form of overlap: three executables, and a second thread that runs every collective.

On CPU a collective and a scan in one executable, or launched from one thread, run one after the other. Here the thread
that calls the round runs the inner steps, while a communication thread runs Mix1 and then the outer step with its blocking
exchanges. Only that one thread launches collectives, so all processes launch them in the same order.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

PyTree = Any


@functools.cache
def _communication() -> ThreadPoolExecutor:
  return ThreadPoolExecutor(max_workers=1, thread_name_prefix="communication")


class HostRound:
  """One outer round from three executables.

  Args:
    start: (z, ms, scalars) -> raw, Mix1's collectives; None where nothing travels beside the inner steps.
    inner: (z, inner_opt_state, batches, scalars) -> w, inner_opt_state, metrics; without collectives.
    land: (z, w, ms, raw, metrics, scalars) -> z', ms', metrics.

  Attributes:
    timeline: seconds (time.monotonic) of the last round's events: begin, mix1_done, inner_done, land_done.
  """

  def __init__(self, start: Callable | None, inner: Callable, land: Callable):
    self.start, self.inner, self.land = start, inner, land
    self.timeline: dict[str, float] = {}

  def __call__(self, z, inner_opt_state, ms, batches, scalars):
    if jax.process_count() > 1:  # what was launched before (an evaluation) may hold collectives, and runs in the background
      jax.block_until_ready(jax.live_arrays())
    self.timeline = {"begin": time.monotonic()}
    raw = _communication().submit(self._timed, "mix1_done", self.start, z, ms, scalars) if self.start else None
    w, inner_opt_state, metrics = self._timed("inner_done", self.inner, z, inner_opt_state, batches, scalars)
    got = None if raw is None else raw.result()
    # The caller waits: whatever it launches next may hold collectives, which must not run beside these.
    z, ms, metrics = _communication().submit(self._timed, "land_done", self.land, z, w, ms, got, metrics, scalars).result()
    return z, inner_opt_state, ms, metrics

  def _timed(self, event: str, run: Callable, *args: Any) -> Any:
    out = jax.block_until_ready(run(*args))
    self.timeline[event] = time.monotonic()
    return out


def compile_stages(start: Callable | None, inner: Callable, land: Callable, z: PyTree, inner_opt_state: PyTree, ms: PyTree,
                   batches: PyTree, scalars: PyTree) -> HostRound:
  """Compiles the three stages (functions as in `HostRound`) for arguments of these ShapeDtypeStructs with shardings.

  The inner optimizer's state is donated to `inner`, z and the method's state to `land`.
  """
  begin = None if start is None else jax.jit(start).lower(z, ms, scalars).compile()
  between = jax.jit(inner, donate_argnums=1, out_shardings=(*shardings((z, inner_opt_state)), None)).lower(
      z, inner_opt_state, batches, scalars).compile()
  metrics = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                         jax.eval_shape(inner, z, inner_opt_state, batches, scalars)[2], between.output_shardings[2])
  raw = None if start is None or begin is None else jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(start, z, ms, scalars),
      begin.output_shardings)
  end = jax.jit(land, donate_argnums=(0, 2), out_shardings=(*shardings((z, ms)), None)).lower(
      z, z, ms, raw, metrics, scalars).compile()
  return HostRound(begin, between, end)


def shardings(tree: PyTree) -> PyTree:
  """The sharding of every leaf."""
  return jax.tree.map(lambda x: x.sharding, tree)
