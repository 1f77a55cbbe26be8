"""The way of messages to a learner's training thread, and the re-seed, which needs a part of every syncer."""

from __future__ import annotations

import queue
import threading
from typing import Any

from fgd_jax.decoupled.learner import Arrived, Reseed


class Inbox:
  """Messages in the order in which they count. Listening threads, one a syncer, put; the training thread gets.

  Between a syncer's part of a re-seed and the last one, newer fragments of that syncer become part of the re-seed: else it
  would set them back.

  Attributes:
    healing: whether a complete re-seed waits here.
  """

  def __init__(self, syncers: int):
    self._syncers = syncers
    self._queue: queue.Queue[list[Any]] = queue.Queue()
    self._lock = threading.Lock()
    self._parts: dict[int, dict[int, Any]] = {}
    self._after: dict[int, list[Any]] = {}
    self.healing = False

  def get(self, block: bool, timeout: float) -> list[Any]:
    """The next messages, to be taken at one boundary; raises queue.Empty."""
    return self._queue.get(block, timeout)

  def put(self, s: int, messages: list[Any]) -> None:
    """What syncer s says, together."""
    with self._lock:
      if s not in self._parts:
        self._queue.put(messages)
        return
      self._parts[s] |= {m.p: (m.t, m.fragment) for m in messages if isinstance(m, Arrived)}
      self._after[s] = [m for m in messages if not isinstance(m, Arrived)]

  def mark(self, message: Any) -> None:
    """A message that also counts while a re-seed is under way."""
    self._queue.put([message])

  def heal(self, s: int, fragments: dict[int, Any]) -> None:
    """Syncer s's part of a re-seed, {p: (t, fragment)}."""
    with self._lock:
      self._parts[s], self._after[s] = dict(fragments), []
      if len(self._parts) == self._syncers:
        whole = {p: x for part in self._parts.values() for p, x in part.items()}
        self._queue.put([Reseed(whole), *(m for messages in self._after.values() for m in messages)])
        self.healing, self._parts, self._after = True, {}, {}

  def wants(self, s: int, core: Any) -> bool:
    """Whether syncer s is to send its part."""
    return not self.healing and (core.sick or bool(self._parts)) and s not in self._parts
