"""`--join`: more learners for a run that goes on. The run owns them: they are in its checkpoints, and Ray restarts them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import ray
from absl import logging
from ml_collections import ConfigDict

from fgd_jax import config as configs
from fgd_jax.decoupled import address as addresses
from fgd_jax.decoupled import cluster
from fgd_jax.decoupled.options import LEARNER_KEYS, check, fingerprint
from fgd_jax.decoupled.run import namespace_of
from fgd_jax.decoupled.watched import TICK_SECONDS


def join(config: ConfigDict, workdir: str, address: str | None, count: int, platforms: str) -> None:
  """Asks the run with this folder's name for `count` more learners, and returns when they train. They belong to the run.

  Raises:
    ValueError: no such run, one that does not answer, a config that contradicts its, learners that fail, or no place.
  """
  check(config)
  namespace, token, patience = namespace_of(workdir), uuid.uuid4().hex, _Patience(config)
  _connect(workdir, address, count, namespace)
  try:
    if cluster.find("syncer 0", namespace) is None:
      raise ValueError(f"No run {namespace!r} goes on in this Ray cluster; --workdir must be that of the run to join.")
    own = {key: configs.flat(config)[key] for key in LEARNER_KEYS}
    asked: list[Any] = []
    while not asked and (syncer := cluster.find("syncer 0", namespace)) is not None:
      asked = patience.answer(syncer.invite, fingerprint(config), token, count=count, own=own, platforms=platforms)
    _await_learners([f"{token} {i}" for i in range(count)], namespace, patience)
  finally:
    ray.shutdown()


def _connect(workdir: str, address: str | None, count: int, namespace: str) -> None:
  """To the cluster of the run: the one that is given, or that the run's folder names."""
  if address is not None:
    cluster.connect(address, 0, namespace)
    return
  if (known := addresses.recall(workdir)) is None:
    raise ValueError(f"--join={count} needs a run that goes on in a Ray cluster, and none goes on in --workdir={workdir} on "
                     "this machine; start it first, or give the --ray-address=HOST:PORT of its cluster.")
  try:
    cluster.connect(known, 0, namespace)
  except ValueError as e:
    raise ValueError(f"--join={count}: the Ray cluster {known} of the run in --workdir={workdir} cannot be joined; was the "
                     f"run killed? Then start it again. ({e})") from e


class _Patience:
  """Says once that a run does not answer, and gives up after limits.stall."""

  def __init__(self, config: ConfigDict):
    self._after, self._limit = config.decoupled.silent_after, config.limits.stall
    self._since, self._said = time.monotonic(), False

  def answer(self, method: Any, *args: Any, **more: Any) -> list[Any]:
    """As `_answer`, of the run's syncer."""
    if found := _answer(method, *args, **more):
      self._since, self._said = time.monotonic(), False
      return found
    waited = time.monotonic() - self._since
    if waited > self._after and not self._said:
      self._said = True
      logging.warning("The run's syncer has not answered for %.0f s; is it paused?", waited)
    if 0 < self._limit < waited:
      raise ValueError(f"The run's syncer has not answered for {waited:.0f} s (limits.stall={self._limit:g}); look whether "
                       "its process is paused. The learners are part of the run if it goes on.")
    return []


def _answer(method: Any, *args: Any, **more: Any) -> list[Any]:
  """[the answer of an actor], [] where it does not answer, perhaps because it is just starting again."""
  try:
    return [ray.get(method.remote(*args, **more), timeout=10)]
  except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
    time.sleep(TICK_SECONDS)
    return []
  except ray.exceptions.RayTaskError as e:
    raise e.cause from None  # a refusal, in a sentence of its own


def _await_learners(names: list[str], namespace: str, patience: _Patience) -> None:
  """Until the actors of these names train, or the run ends."""
  end, placed = time.monotonic() + cluster.START_SECONDS, set()  # type: float, set[str]
  while names:
    time.sleep(TICK_SECONDS)
    if (syncer := cluster.find("syncer 0", namespace)) is None:
      logging.info("The run has ended.")
      return
    patience.answer(syncer.started)
    for name in list(names):
      learner = cluster.find(name, namespace)
      for status in [] if learner is None else _answer(learner.status):
        placed.add(name)
        if status["failure"]:
          raise ValueError(status["failure"])
        if status["started"]:
          logging.info("Learner %d trains; it is part of the run now.", status["learner"])
          names.remove(name)
    if (missing := set(names) - placed) and time.monotonic() > end:
      raise ValueError(f"Ray has not started {len(missing)} of the new learners within {cluster.START_SECONDS:.0f} s; they "
                       "start when they have a place, and `ray status` shows what has none: lower decoupled.resources, or "
                       "add machines to the cluster.")
