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
    self._asked = self._again = 0.0
    self._silent = False
    self.down: tuple[float, str] | None = None  # since when, and why
    self.last: dict[str, Any] = {}

  def waited(self) -> float:
    """Seconds since the call that has no answer yet; 0 where none is out, or the actor is down."""
    return 0.0 if self._call is None or self.down is not None else time.monotonic() - self._asked

  def look(self, note: Callable[[str, str, str], None], silent_after: float = float("inf")) -> dict[str, Any] | None:
    """The newest answer, None where there is no new one; never waits. After `silent_after` seconds it notes the silence."""
    if self._call is None:
      if time.monotonic() < self._again:
        return None
      self._call, self._asked = self._ask(self.handle), time.monotonic()
    if not ray.wait([self._call], timeout=0)[0]:
      if (waited := self.waited()) > silent_after and not self._silent:
        self._silent = True
        note(self.name, "silent", f"no answer for {waited:.1f} s; process {self.last.get('pid', 'unknown')} may be paused")
      return None
    call, self._call = self._call, None
    self._again = time.monotonic() + TICK_SECONDS
    try:
      self.last = ray.get(call)
      if self._silent:
        self._silent = False
        note(self.name, "back", "it answers again")
    except ray.exceptions.RayActorError as e:
      self._silent = False
      self._again = time.monotonic() + 0.5
      if self.down is None:
        self.down = time.monotonic(), " ".join(str(e).split())[:300]
        note(self.name, "died", self.down[1])
      return None
    if self.down is not None:
      self.down = None
      note(self.name, "restarted", f"by Ray, process {self.last['pid']}")
    return self.last
