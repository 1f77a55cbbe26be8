"""The contract of a method: three pure functions for ONE worker; no scan, no placement, no barrier.

    init(z) -> ms                        the method's own state (outer optimizer, ...)
    launch(z, ms) -> tree                what Mix1 carries while the inner steps run
    land(z, w, x, ms, ctx) -> z', ms'    after them: z is where they started, w where they ended, x the mixed launch tree

The round (round.py) runs:  raw = mix1.start(launch(z, ms));  w = scan of H inner steps from z;  barrier;
x = mix1.finish(raw);  land.  A method with mix1 None launches nothing and gets x = None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import optax

from fgd_jax.mixing import Context, Mixer
from fgd_jax.mixing import make as make_mixer
from fgd_jax.outer import nesterov

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Method:
  """Base of all methods. Fields hold names of topologies until `bind` makes mixers that know the workers.

  Attributes of a subclass:
    mixers: names of its fields that hold a mixer; "mix1" is the overlapped one, all others block.
    inner_grad: None, or a function (grads, ctx) -> grads applied in every inner step (data_parallel only).
  """

  mixers: ClassVar[tuple[str, ...]] = ()
  inner_grad: ClassVar[Callable[..., PyTree] | None] = None

  def __getstate__(self) -> dict[str, Any]:
    """Fields alone: what is derived from them (optax closures) cannot be pickled and is made again."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  def init(self, z: PyTree) -> PyTree:
    """The method's state for one worker that starts at parameters z."""
    return ()

  def launch(self, z: PyTree, ms: PyTree) -> PyTree:
    """The tree that Mix1 carries during the inner steps."""
    return z

  def land(self, z: PyTree, w: PyTree, x: PyTree, ms: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
    """The outer step; blocking exchanges happen here, by calling a mixer with ctx."""
    raise TypeError(f"{type(self).__name__} does not define land.")

  def bind(self, workers: int, seed: int = 0) -> "Method":
    """The method that knows M: every topology becomes a `Mixer` with a random stream of its own."""
    bound = {}
    for stream, field in enumerate(self.mixers):
      topology = getattr(self, field)
      if not isinstance(topology, Mixer):
        bound[field] = make_mixer(topology or "identity", workers=workers, seed=_stream_seed(seed, stream), key=field)
    return dataclasses.replace(self, **bound)

  def bound_mixers(self) -> list[Mixer]:
    """All mixers of a bound method, the overlapped one first."""
    return [getattr(self, field) for field in self.mixers]

  @property
  def overlapped(self) -> Mixer | None:
    """The bound Mix1, None where nothing travels during the inner steps."""
    mixer = getattr(self, "mix1", None)
    return None if mixer is None or mixer.topology.identity else mixer


def topology_name(topology: Any) -> str | None:
  """The name of a topology given as a name, as (name, options) or as a mixer."""
  if isinstance(topology, Mixer):
    return topology.topology.name
  return topology if topology is None or isinstance(topology, str) else topology[0]


def _stream_seed(seed: int, stream: int) -> int:
  """Different, reproducible seeds for mix1, mix2, ... from one seed (splitmix64's odd constant, kept to 63 bits)."""
  return (seed * 0x9E3779B97F4A7C15 + stream + 1) & ((1 << 63) - 1)


def outer_optimizer(outer: Any, outer_lr: Any, outer_momentum: float | None, use_nesterov: bool = True,
                    default_lr: float = 0.7, default_momentum: float = 0.9) -> optax.GradientTransformation:
  """The optax transform of a method: `outer` as given, else Nesterov SGD (arXiv 2311.08105; defaults 0.7 / 0.9)."""
  if outer is not None:
    if outer_lr is not None or outer_momentum is not None:
      raise ValueError("outer= stands in place of outer_lr and outer_momentum; give one or the other.")
    if not (hasattr(outer, "init") and hasattr(outer, "update")):
      raise ValueError(f"outer={outer!r} must be an optax transform, such as optax.sgd(0.7, momentum=0.9, nesterov=True).")
    return outer
  return nesterov(default_lr if outer_lr is None else outer_lr,
                  default_momentum if outer_momentum is None else outer_momentum, use_nesterov)


def outer_gradient(z: PyTree, w: PyTree, ctx: Context) -> PyTree:
  """Delta = start - end of the inner phase, weighted by the worker's share where weights were given."""
  return ctx.weigh(jax.tree.map(lambda a, b: a - b, z, w))


def outer_step(outer: optax.GradientTransformation, delta: PyTree, state: PyTree, start: PyTree
               ) -> tuple[PyTree, PyTree]:
  """One step of the outer optimizer from `start` with outer gradient `delta`."""
  updates, state = outer.update(delta, state, start)
  return optax.apply_updates(start, updates), state
