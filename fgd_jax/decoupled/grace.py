"""The adaptive grace window: how long a syncer with a quorum waits for more learners (arXiv 2604.21428, equation 3)."""

from __future__ import annotations

DECAY = 0.9  # of the moving averages; not published


class Grace:
  """grace = clamp(gamma (tau xi_step - xi_quorum - xi_sync), 0, cap), seconds; xi are exponential moving averages.

      xi_step    inner step time of the slowest learner in reach
      xi_quorum  from the first contribution to the K-th one: inner steps between fragments are not slack that was used up
      xi_sync    merging, writing and transfer

  so that the answer is back at a learner about tau of the slowest learner's inner steps after its contribution.
  Evidence: the equation from third parties [3P]; what xi_quorum counts, the decay, gamma and cap are ours [INF].

  Args:
    gamma: in [0, 1). cap: seconds. overlap: tau, inner steps; 0 counts as 1, since a learner that waits anyway can wait
      that long.
  """

  def __init__(self, gamma: float, cap: float, overlap: int):
    self._gamma, self._cap, self._tau = gamma, cap, max(1, overlap)
    self.step = self.quorum = self.sync = 0.0
    self._seen: set[str] = set()

  def observe(self, **seconds: float) -> None:
    """Takes new values of step, quorum or sync into their averages; the first one is the average."""
    for name, value in seconds.items():
      old = getattr(self, name)
      setattr(self, name, DECAY * old + (1 - DECAY) * value if name in self._seen else value)
      self._seen.add(name)

  def window(self) -> float:
    """Seconds to wait after the quorum."""
    return min(max(self._gamma * (self._tau * self.step - self.quorum - self.sync), 0.0), self._cap)
