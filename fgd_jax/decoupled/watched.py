"""Actors that are asked again and again, without ever waiting for one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

TICK_SECONDS = 0.1


class Watched:
  """One actor and the call to it whose answer is awaited."""

  def __init__(self, name: str, handle: Any, ask: Callable[[Any], Any]):
    self.name, self.handle, self._ask = name, handle, ask
    self._call: Any = None
    self._again = 0.0
    self.down: tuple[float, str] | None = None  # since when, and why
    self.last: dict[str, Any] = {}

  def look(self, note: Callable[[str, str, str], None]) -> dict[str, Any] | None:
    """The newest answer, None where there is no new one; never waits."""
    if self._call is None:
      if time.monotonic() < self._again:
        return None
      self._call = self._ask(self.handle)
    if not ray.wait([self._call], timeout=0)[0]:
      return None
    call, self._call = self._call, None
    self._again = time.monotonic() + TICK_SECONDS
    try:
      self.last = ray.get(call)
    except ray.exceptions.RayActorError as e:
      self._again = time.monotonic() + 0.5
      if self.down is None:
        self.down = time.monotonic(), " ".join(str(e).split())[:300]
        note(self.name, "died", self.down[1])
      return None
    if self.down is not None:
      self.down = None
      note(self.name, "restarted", f"by Ray, process {self.last['pid']}")
    return self.last
