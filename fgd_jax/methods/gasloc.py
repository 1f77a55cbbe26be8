"""GASLoC (arXiv 2606.11081): gossip on the points after the local steps, with accelerated (Nesterov type) momentum.

Evidence: the update rule from a third party (3P), not checked against the paper, whose hyperparameters were not available.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fgd_jax.methods.base import Compressed, Method, check_number, outer_gradient, topology_name
from fgd_jax.mixing import Mixer, Topology


@dataclasses.dataclass(frozen=True)
class GASLoC(Compressed):
  """One exchange a round, over the edges of a graph with weighted Laplacian Lambda that may be drawn afresh.

      y_t         = theta_t - eta Delta_t
      "local":    theta_{t+1} = (I - alpha Lambda) y_t + gamma (y_t - y_{t-1})    (as transcribed)
      "mixed":    theta_{t+1} = (I - alpha Lambda) (y_t + gamma (y_t - y_{t-1}))   (DiLoCo on a complete graph)

  with y_{-1} = theta_0. Which form is the paper's is open.

  Args:
    topology: a symmetric topology T, of which Lambda = I - T: "random_pairs" (one peer, edge weight 1), "two_random_pairs",
      ("edges", {"edges": ((i, j, weight), ...)}) for any weighted graph, "ring", ... : a name or (name, options).
    eta: step along the outer gradient. alpha: strength of the gossip. gamma: momentum (0: none). Defaults are ours (INF).
    momentum_mixing: "local" or "mixed".
    inner_steps: [H_1, ..., H_M], steps that each worker takes of a round's H; None: all.
    codec: see `Compressed`; only bf16 and int8, since parameters are sent. What a worker's codec loses it adds back.
  """

  topology: Any = "random_pairs"
  eta: float = 0.7
  alpha: float = 1.0
  gamma: float = 0.5
  momentum_mixing: str = "local"
  inner_steps: Sequence[int] | None = None  # type: ignore[misc]
  mix: Any = None
  mixers: ClassVar[tuple[str, ...]] = ("mix",)

  def __post_init__(self):
    super().__post_init__()
    check_number("eta", self.eta)
    check_number("alpha", self.alpha)
    check_number("gamma", self.gamma, below=1, why="it is the momentum")
    if self.momentum_mixing not in ("local", "mixed"):
      raise ValueError(f"momentum_mixing={self.momentum_mixing!r} must be 'local' or 'mixed'.")
    if self.error_feedback:
      raise ValueError("error_feedback=True: gasloc sends parameters, and a worker adds back at once what its codec loses; "
                       "leave it unset.")
    self.refuse_coarse("which gasloc sends; use 'bf16' or 'int8'.")
    steps = self.inner_steps
    if steps is not None and not (isinstance(steps, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in steps)):
      raise ValueError(f"inner_steps={steps!r} must hold a number of steps, at least 0, for each worker.")

  def bind(self, workers: int, seed: int = 0) -> Method:
    if isinstance(self.mix, Mixer):
      return self
    bound = dataclasses.replace(self, mix=self.topology).bind_mixers(workers, seed)
    topology = bound.mix.topology
    if not topology.symmetric:
      raise ValueError(f"topology={topology.name!r} is directed; gasloc needs a symmetric one, such as random_pairs, ring "
                       f"or edges.")
    if self.inner_steps is not None and len(self.inner_steps) != workers:
      raise ValueError(f"inner_steps={list(self.inner_steps)} must hold a number of steps for each of the {workers} "
                       f"workers.")
    topology = topology.weakened(self.alpha)
    self._warn(topology)
    return dataclasses.replace(bound, mix=dataclasses.replace(bound.mix, topology=topology))

  def _warn(self, topology: Topology) -> None:
    """Where gossip alone, or pair gossip with local momentum, is unstable (methods-core.md 5.3, 6.2)."""
    limit = 2 * (1 - self.gamma**2)
    pairs = topology_name(self.topology) == "random_pairs" and self.momentum_mixing == "local"
    if topology.contraction() > 1 + 1e-9 or (pairs and self.alpha > limit):
      warnings.warn(f"alpha={self.alpha} with gamma={self.gamma} is beyond the stability limit of the gossip"
                    f"{f', 2 (1 - gamma^2) = {limit:.3f} for pairs' if pairs else ''}: the workers may drift apart; lower "
                    "one of them.", stacklevel=3)

  def init(self, z):
    return {"y": z}

  def land(self, z, w, x, ms, ctx):
    y = jax.tree.map(lambda z, d: z - self.eta * d, z, outer_gradient(z, w, ctx))
    momentum = jax.tree.map(lambda y, before: self.gamma * (y - before), y, ms["y"])
    sent = jax.tree.map(jnp.add, y, momentum) if self.momentum_mixing == "mixed" else y
    new = self.mix(sent, ctx)
    if self.mix.codec is not None:  # add what the own codec loses, so that the mean is kept exactly
      kept = jax.tree.map(jnp.subtract, sent, self.mix.seen(sent, ctx))
      new = jax.tree.map(lambda n, k: n + jnp.where(self.mix.heard(ctx), k, 0), new, kept)
    return new if self.momentum_mixing == "mixed" else jax.tree.map(jnp.add, new, momentum), {"y": y}
