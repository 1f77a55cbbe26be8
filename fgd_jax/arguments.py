"""What `build_round` and a round refuse, each in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fgd_jax.methods import Fragmented, Method
from fgd_jax.mixing import path_of
from fgd_jax.workers import Workers

PyTree = Any


def check_build(method: Any, inner_optimizer: Any, workers: Any, seed: Any, accumulate: int, inner_loop: str,
                measure: Sequence[Any]) -> None:
  """Refuses impossible arguments of `build_round`."""
  if not isinstance(method, Method):
    raise ValueError(f"method={method!r}: pass fgd_jax.methods.make(name, ...).")
  if not (hasattr(inner_optimizer, "init") and hasattr(inner_optimizer, "update")):
    raise ValueError(f"inner_optimizer={inner_optimizer!r} must be an optax transform, such as optax.adamw(1e-3).")
  if not isinstance(workers, Workers):
    raise ValueError(f"workers={workers!r}: pass fgd_jax.Workers(count, mesh=None).")
  prng = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
  if prng != "threefry2x32":
    raise ValueError(f"jax_default_prng_impl={prng!r} gives different numbers under vmap than "
                     "in a loop, so placements would differ; use threefry2x32.")
  if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
    raise ValueError(f"seed={seed!r} must be an integer from 0 to 2^63 - 1.")
  if accumulate < 1:
    raise ValueError(f"accumulate={accumulate}: at least one micro-batch is needed.")
  if inner_loop not in ("auto", "map", "vmap"):
    raise ValueError(f"inner_loop={inner_loop!r} must be 'auto', 'map' or 'vmap'.")
  for m in measure:
    if m != "consensus" and not callable(m):
      raise ValueError(f"measure={m!r} must be 'consensus' or a function (w, z) -> dict.")


def check_quarantine(method: Method, worker_weights: Any) -> None:
  """Refuses what cannot leave a sick worker out of its means."""
  if worker_weights is not None:
    raise ValueError("quarantine=True with worker_weights: the weights of those that are left out are not known to the "
                     "others, so the mean would be weighted wrongly; leave one of them out.")
  for mixer in method.bound_mixers():
    if not mixer.topology.symmetric and mixer.key != "mix1":
      raise ValueError(f"quarantine=True needs symmetric topologies, and {mixer.key}={mixer.topology.name!r} is directed: "
                       "leaving out one worker would move the mean of the others; use random_pairs, ring or hypercube.")


def link_tables(method: Method, links: Any) -> dict[str, np.ndarray]:
  """bool [events, M, M] for each mixer of a bound method; links None: everything works."""
  tables: dict[str, np.ndarray] = {}
  given = dict(links or {})
  for mixer in method.bound_mixers():
    workers = mixer.topology.workers
    events = method.count if isinstance(method, Fragmented) else 1
    table = np.asarray(given.pop(mixer.key, np.ones((workers, workers), bool)))
    table = np.broadcast_to(table[None], (events, *table.shape)) if table.ndim == 2 else table
    if table.shape != (events, workers, workers) or table.dtype != bool or not (table == table.transpose(0, 2, 1)).all():
      raise ValueError(f"links[{mixer.key!r}] has shape {table.shape} and dtype {table.dtype}; it must be bool [M, M] or "
                       f"[events, M, M] = {(events, workers, workers)}, symmetric in the workers.")
    tables[mixer.key] = table
  if given:
    raise ValueError(f"links names {sorted(given)}; this method's exchanges are {sorted(tables)}.")
  return tables


def shares(weights: Sequence[float], workers: int) -> np.ndarray:
  """[M] weights scaled to sum M."""
  try:
    out = np.asarray(weights, np.float64)
  except (TypeError, ValueError):
    out = np.zeros(())
  if out.shape != (workers,) or not np.all(np.isfinite(out)) or np.any(out <= 0):
    raise ValueError(f"worker_weights={weights!r} must hold one positive number for each of the {workers} workers.")
  return out * workers / out.sum()


def strong(x: Any) -> Any:
  """The leaf as an array whose dtype does not yield to others (a weakly typed state would compile twice)."""
  if isinstance(x, jax.Array) and not x.weak_type:
    return x
  array = np.asarray(x) if not isinstance(x, jax.Array) else x
  wanted = jax.dtypes.canonicalize_dtype(array.dtype)
  if wanted != array.dtype and not np.isscalar(x):
    raise ValueError(f"A parameter has dtype {array.dtype}, which would become {wanted}; enable it with "
                     "jax.config.update('jax_enable_x64', True) or convert the parameters.")
  return jnp.asarray(array, dtype=wanted)


def check_params(params: PyTree) -> None:
  """Refuses parameters that are not floating-point arrays."""
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  if not leaves:
    raise ValueError("params has no leaves; pass a pytree of floating-point arrays.")
  for path, x in leaves:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"Parameter {path_of(path)!r} has dtype {x.dtype}; parameters must be real floating-point. Keep "
                       "integers in the loss function's closure or in the batch.")


def alive_mask(alive: Any, workers: int) -> np.ndarray:
  """bool [M]; None: all."""
  alive = np.ones(workers, bool) if alive is None else np.asarray(alive)
  if alive.shape != (workers,) or not np.isin(alive, (0, 1)).all():
    raise ValueError(f"alive={alive.tolist()} must hold True or False for each of the {workers} workers.")
  return alive.astype(bool)


def check_round(method: Method, params: PyTree, batches: PyTree, workers: int, accumulate: int) -> None:
  """Refuses batches, and a state, that do not fit the round."""
  leaves = jax.tree_util.tree_flatten_with_path(batches)[0]
  if not leaves:
    raise ValueError("batches is empty; it needs leaves of shape [workers, inner steps, ...].")
  first = tuple(jnp.shape(leaves[0][1]))
  for path, x in leaves:
    shape = tuple(jnp.shape(x))
    if len(shape) < 2 or shape[0] != workers or shape[:2] != first[:2] or shape[1] < 1:
      raise ValueError(f"Batch leaf {path_of(path) or 'batches'!r} has shape {shape}; all leaves need the shape "
                       f"[workers={workers}, inner steps, ...] with the same number of inner steps.")
    if accumulate > 1 and (len(shape) < 3 or shape[2] % accumulate):
      raise ValueError(f"Batch leaf {path_of(path) or 'batches'!r} has shape {shape}; accumulate={accumulate} must "
                       "divide its third axis, the batch.")
  if isinstance(method, Fragmented):
    method.check_steps(first[1])
  for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
    if x.shape[:1] != (workers,):
      raise ValueError(f"state.params/{path_of(path)} has shape {tuple(x.shape)} for {workers} workers; make "
                       "the state with the init that build_round returned together with this round.")
