"""`--join`: more learners for a run that goes on. The run owns them: they are in its checkpoints, and Ray restarts them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import ray
from absl import logging
from ml_collections import ConfigDict

from fgd_jax import config as configs
from fgd_jax.decoupled import cluster
from fgd_jax.decoupled.options import LEARNER_KEYS, check, fingerprint
from fgd_jax.decoupled.run import namespace_of
from fgd_jax.decoupled.watched import TICK_SECONDS


def join(config: ConfigDict, workdir: str, address: str | None, count: int, platforms: str) -> None:
  """Asks the run with this folder's name for `count` more learners, and returns when they train. They belong to the run.

  Raises:
    ValueError: no such run, a config that contradicts its, learners that fail, or no place for them.
  """
  check(config)
  namespace, token = namespace_of(workdir), uuid.uuid4().hex
  cluster.connect(address or "auto", 0, namespace)
  try:
    if cluster.find("syncer 0", namespace) is None:
      raise ValueError(f"No run {namespace!r} goes on in this Ray cluster; --workdir must be that of the run to join.")
    own = {key: configs.flat(config)[key] for key in LEARNER_KEYS}
    asked: list[Any] = []
    while not asked and (syncer := cluster.find("syncer 0", namespace)) is not None:
      asked = _answer(syncer.invite, fingerprint(config), token, count=count, own=own, platforms=platforms)
    _await_learners([f"{token} {i}" for i in range(count)], namespace)
  finally:
    ray.shutdown()


def _answer(method: Any, *args: Any, **more: Any) -> list[Any]:
  """[the answer of an actor], [] where it does not answer, perhaps because it is just starting again."""
  try:
    return [ray.get(method.remote(*args, **more), timeout=10)]
  except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
    time.sleep(TICK_SECONDS)
    return []
  except ray.exceptions.RayTaskError as e:
    raise e.cause from None  # a refusal, in a sentence of its own


def _await_learners(names: list[str], namespace: str) -> None:
  """Until the actors of these names train, or the run ends."""
  end, placed = time.monotonic() + cluster.START_SECONDS, set()  # type: float, set[str]
  while names:
    time.sleep(TICK_SECONDS)
    if cluster.find("syncer 0", namespace) is None:
      logging.info("The run has ended.")
      return
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
