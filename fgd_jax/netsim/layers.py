"""The per-layer model of Streaming DiLoCo's simulator (arXiv 2501.18512): reductions beside the backward pass.

A step is a graph of 4L-1 nodes for L layers: L forward, L-1 gradients of activations (the first layer needs none), L
gradients of weights, and in a step that reduces, L reductions. Only the link between data centres is modelled, and the first
three kinds take the same time, T/(3L-1) each. Two resources work through their nodes in order: the chips (forward; then per
layer from the last to the first activations and weights), and the link (reductions in the order in which gradients appear).

The paper leaves the rest open; our choices, the same for all sizes:
  * a step begins when what is due has arrived: in the next step, or `delay` steps later;
  * reductions are spread evenly over layers; nothing outside the layers is sent;
  * two data centres (the paper's M = 2), whose ring all-reduce puts 2 (M-1)/M = 1 payload on the link;
  * fragment p of P = L/3 has the layers l with l mod P = p (strided) and is due after step floor((p+1) H/P).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from typing import NamedTuple

MOST_LAYERS = 10_000


class Node(NamedTuple):
  """One node of a step's graph: kind "forward", "activation", "weight" or "reduce", its layer (0 is the first)."""

  kind: str
  layer: int
  after: tuple[tuple[str, int], ...]  # nodes of the same step that it needs


@functools.cache
def step_graph(layers: int) -> tuple[Node, ...]:
  """The 4L-1 nodes of a step in which every layer is reduced, each resource's in the order in which it takes them."""
  nodes = [Node("forward", l, (("forward", l - 1),) if l else ()) for l in range(layers)]
  for l in reversed(range(layers)):
    source = ("forward", l) if l == layers - 1 else ("activation", l + 1)
    nodes.append(Node("weight", l, (source,)))
    if l:
      nodes.insert(-1, Node("activation", l, (source,)))
  nodes += [Node("reduce", l, (("weight", l),)) for l in reversed(range(layers))]
  return tuple(nodes)


@dataclasses.dataclass(frozen=True)
class Layered:
  """A training step by layers.

  Attributes:
    layers: L. step_seconds: T, of a step that waits for nothing.
    bits: that the link carries to reduce the whole model once.
    steps: H, inner steps of a cycle.
    fragments: P; 1 reduces everything at once, 0 in every step (data parallelism).
    delay: steps that a reduction may take before it is waited for.
  """

  layers: int
  step_seconds: float
  bits: float
  steps: int = 100
  fragments: int = 1
  delay: int = 0

  def __post_init__(self):
    if self.layers > MOST_LAYERS:
      raise ValueError(f"layers={self.layers} must be at most {MOST_LAYERS}.")
    if self.layers < 1 or self.steps < 1 or not 0 <= self.fragments <= min(self.layers, self.steps) or self.delay < 0:
      raise ValueError(f"layers={self.layers}, inner_steps={self.steps}, fragments={self.fragments}, delay={self.delay}: "
                       "fragments must be at most the layers and the inner steps, and none may be negative.")

  def due_layers(self, step: int) -> frozenset[int]:
    """The layers that are reduced in this step (of 0..H-1)."""
    if not self.fragments:
      return frozenset(range(self.layers))
    parts = [p for p in range(self.fragments) if (p + 1) * self.steps // self.fragments - 1 == step]
    return frozenset(l for l in range(self.layers) if l % self.fragments in parts)

  def utilization(self, bandwidth: float) -> float:
    """Compute time over elapsed time of a cycle in the steady state, at `bandwidth` bits a second.

    Cycles are played until one begins as the last one did: the link may fall behind a little in each, until the chips have
    to wait for it. At most 100: where it falls behind for longer than that, a cycle takes as long as the link is busy in it.
    """
    unit, per = self.step_seconds / (3 * self.layers - 1), self.bits / self.layers / bandwidth
    cycle = self.steps if self.fragments else 1
    compute, busy = cycle * self.step_seconds, self.bits / bandwidth
    chips = link = 0.0
    arrivals: dict[int, float] = {}  # when what is due at the start of a step is there
    before, took = None, compute
    for n in range(100):
      began = chips  # before it waits for what is due then
      state = [max(link - chips, 0.0), *(max(arrivals[t] - chips, 0.0) for t in sorted(arrivals))]
      if before is not None and len(state) == len(before) and all(
          abs(a - b) <= 1e-12 * compute for a, b in zip(state, before)):
        break
      before = state
      for t in range(n * cycle, (n + 1) * cycle):
        chips = max(chips, arrivals.pop(t, 0.0))
        layers = self.due_layers(t % cycle)
        if not layers:
          chips += self.step_seconds
          continue
        gradients: dict[int, float] = {}
        for kind, layer, _ in step_graph(self.layers):  # every node's predecessors stand before it
          if kind == "reduce":
            if layer in layers:
              link = max(link, gradients[layer]) + per
            continue
          chips += unit
          if kind == "weight":
            gradients[layer] = chips
        arrivals[t + 1 + self.delay] = link
      took = chips - began
    return compute / max(took, busy, compute)

  def needed(self, target: float, grid: list[float]) -> float:
    """The first bandwidth of an ascending grid with at least `target` utilisation (infinity: none).

    Raises:
      ValueError: a target outside (0, 1).
    """
    if not 0 < target < 1:
      raise ValueError(f"target={target} must be between 0 and 1.")
    i = bisect.bisect_left(grid, target, key=lambda bandwidth: self.utilization(bandwidth))
    return grid[i] if i < len(grid) else float("inf")
