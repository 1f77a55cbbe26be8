"""Ray: a local cluster or one that is there, and the actors of a run on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import ray
from absl import logging
from ml_collections import ConfigDict

from fgd_jax.decoupled import actors
from fgd_jax.decoupled.options import Options, environment, resources

CONNECT_SECONDS = 30.0
START_SECONDS = 180.0
# `ray.init` has no time limit where something answers that is not Ray, and cannot be interrupted in this process.
PROBE = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"


def connect(address: str | None, processes: int, namespace: str) -> None:
  """Joins the Ray cluster at `address`, or starts one on this machine that has room for so many processes.

  Raises:
    ValueError: nothing answers at that address within CONNECT_SECONDS, or it does not let us in.
  """
  os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
  warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # Ray starts its processes by fork and exec
  common: dict[str, Any] = {"namespace": namespace, "include_dashboard": False, "log_to_driver": False,
                            "logging_level": "WARNING", "configure_logging": False}
  if address is None:
    ray.init(address="local", num_cpus=processes, **common)
    return
  if address != "auto":
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
      socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as e:
      raise ValueError(f"--ray-address={address}: nothing answers there ({e}); start Ray with `ray start --head "
                       "--port=6379` and give HOST:PORT, or leave the flag out for a local one.") from e
    _probe(address)
  try:
    del common["include_dashboard"]
    ray.init(address=address, **common)
  except (ConnectionError, RuntimeError, ValueError) as e:
    reason = str(e).strip().splitlines()[0]
    raise ValueError(f"--ray-address={address} cannot be joined ({reason}); start Ray with `ray start --head` first, or "
                     "leave the flag out for a local one.") from e


def _probe(address: str) -> None:
  try:
    done = subprocess.run([sys.executable, "-c", PROBE, address], timeout=CONNECT_SECONDS, capture_output=True, text=True)
    if "AuthToken" in done.stderr:
      raise ValueError(f"--ray-address={address} wants a token that this process does not give: set RAY_AUTH_MODE=token "
                       "here and have the cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN, or start all with "
                       "RAY_AUTH_MODE=disabled.")
  except subprocess.TimeoutExpired as e:  # an error is left to the real attempt, which names it
    raise ValueError(f"--ray-address={address}: something answers there, but not as Ray within {CONNECT_SECONDS:.0f} s; "
                     "give HOST:PORT of `ray start --head`, or leave the flag out for a local one; a cluster with a token "
                     "needs RAY_AUTH_MODE=token here.") from e


def check_room(config: ConfigDict, options: Options, there: Mapping[str, float]) -> None:
  """Compares what learners reserve with what a cluster has in all: a learner without a place would be waited for in silence.

  Raises:
    ValueError: there is no room for as many learners as the quorum needs.
  """
  for name, count in {"CPU": 1.0, **resources(config)}.items():
    room = there.get(name, 0) - (options.syncers if name == "CPU" else 0)
    if count * options.quorum > room:
      raise ValueError(f"Ray has {max(room, 0):g} {name} for learners that reserve {count:g} each, and quorum="
                       f"{options.quorum} of them have to run; change decoupled.resources or quorum, or add machines.")
    if count * options.learners > room:
      logging.warning("Ray has %g %s for learners=%d that reserve %g each; some will wait for a place.", room, name,
                      options.learners, count)


def start_syncers(config: ConfigDict, options: Options, vocab_size: int, workdir: str) -> list[Any]:
  """The syncers, on this machine (where the run's folder is), ready to answer.

  Raises:
    ValueError: Ray has no place for them, or cannot load them.
  """
  here = f"node:{ray.util.get_node_ip_address()}"
  local = {here: 0.001} if here in ray.cluster_resources() else {}
  if not local and ray.util.client.ray.is_connected():
    raise ValueError("Syncers write in --workdir on this machine, which is not part of the Ray cluster; run `ray start "
                     "--address=HEAD:PORT` here and give that HOST:PORT, or use launch/decoupled.sh --submit.")
  try:
    made: list[Any] = [ray.remote(actors.Syncer).options(
        name=f"syncer {s}", num_cpus=1, resources=local, max_restarts=-1, max_concurrency=100,
        runtime_env={"env_vars": environment(config, "cpu")}).remote(config, vocab_size, options.shards, workdir, s)
        for s in range(options.syncers)]
    ray.get([s.news.remote(0, 0) for s in made], timeout=START_SECONDS)
  except ray.exceptions.GetTimeoutError as e:
    raise ValueError(f"Ray did not start {options.syncers} syncers in {START_SECONDS:.0f} s; it has "
                     f"{ray.available_resources().get('CPU', 0):g} CPUs free, and every actor needs one.") from e
  except (AttributeError, ImportError) as e:  # Ray Client loads them where the cluster is
    raise ValueError(f"The Ray cluster cannot load fgd_jax as it is here ({e}); install the same version there.") from e
  except ray.exceptions.RayActorError as e:
    raise ValueError(f"A syncer could not start: {str(e).strip().splitlines()[-1]}") from e
  return made


def start_learner(config: ConfigDict, shards: int, vocab_size: int, workdir: str, namespace: str, platforms: str,
                  number: int, resumes: int = 0, name: str | None = None) -> Any:
  """One learner; Ray restarts it when it dies. `name`: by which other commands find it."""
  wanted = resources(config)
  return ray.remote(actors.Learner).options(
      name=name, num_cpus=wanted.pop("CPU", 1), num_gpus=wanted.pop("GPU", 0), resources=wanted, max_restarts=-1,
      max_concurrency=8, runtime_env={"env_vars": environment(config, platforms)}).remote(
          config, vocab_size, shards, workdir, namespace, number, resumes)


def find(name: str, namespace: str) -> Any:
  """An actor of a run by its name, None where there is none."""
  try:
    return ray.get_actor(name, namespace)
  except ValueError:
    return None
