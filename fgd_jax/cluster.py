"""Which processes make one run: read from the environment, and a roll call that names those that are missing.

jax's own start-up aborts the process when a peer is missing, without saying which one. So before it, process 0 listens on
the coordinator's port for a moment, all others call in, and everybody gets the same answer: all are there, or one sentence.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

OURS = ("FGD_COORDINATOR", "FGD_NUM_PROCESSES", "FGD_PROCESS_ID")
LATE_SECONDS = 2.0  # in which those who come after a contradiction hear of it, too
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")  # what jax reads
SLICES = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")


class StartError(ValueError):
  """The processes of a run do not come together, in one sentence."""


class Cluster(NamedTuple):
  """The processes of a run.

  Attributes:
    coordinator: "host:port" of process 0.
    processes: how many there are.
    process: which one this is, from 0.
    local_devices: of this host's GPUs, those of this process; None for all.
  """

  coordinator: str
  processes: int
  process: int
  local_devices: list[int] | None = None


def from_environment(environment: Mapping[str, str]) -> tuple[Cluster | None, str]:
  """The cluster that the variables FGD_COORDINATOR, FGD_NUM_PROCESSES and FGD_PROCESS_ID describe, and a remark.

  Returns:
    (cluster, "") with all three, or with FGD_NUM_PROCESSES=1 alone; (None, why one process is used) in a SLURM job outside
    srun; (None, "") elsewhere: SLURM steps, TPU and MPI are recognised by jax.

  Raises:
    StartError: some of the variables without the others, or values that contradict each other.
  """
  given = [name for name in OURS if environment.get(name)]
  if given == ["FGD_NUM_PROCESSES"] and environment["FGD_NUM_PROCESSES"] == "1":
    return Cluster("", 1, 0), ""
  if given and len(given) < len(OURS):
    missing = [name for name in OURS if name not in given]
    raise StartError(f"{' and '.join(given)} is set without {' and '.join(missing)}; set all three on every process, or "
                     "FGD_NUM_PROCESSES=1 alone for one process.")
  if given:
    count, index = (_number(environment, name) for name in OURS[1:])
    if not 0 <= index < count:
      raise StartError(f"FGD_PROCESS_ID={index} must be from 0 to FGD_NUM_PROCESSES - 1 = {count - 1}.")
    _address(environment[OURS[0]])
    return Cluster(environment[OURS[0]], count, index), ""
  _refuse_partial_tpu(environment)
  lacking = [name for name in SLURM if name not in environment]
  if SLURM[0] in environment and lacking:
    return None, (f"This is in SLURM job {environment[SLURM[0]]} but not started by srun ({', '.join(lacking)} not set), so "
                  "one process is used; launch/slurm.sh or srun starts one for each task.")
  return None, ""


def _number(environment: Mapping[str, str], name: str) -> int:
  try:
    return int(environment[name])
  except ValueError as e:
    raise StartError(f"{name}={environment[name]!r} must be a whole number.") from e


def _refuse_partial_tpu(environment: Mapping[str, str]) -> None:
  """Variables of which a TPU job on GKE or with several slices sets all: without the rest, processes would wait for ever."""
  hosts = [h for h in (environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or "").split(",")
           if h]
  if len(hosts) > 1 and "TPU_WORKER_ID" not in environment:
    raise StartError(f"TPU_WORKER_HOSTNAMES names {len(hosts)} hosts but TPU_WORKER_ID is not set; set it to the index of "
                     "this host, or unset TPU_WORKER_HOSTNAMES for one process.")
  given = [name for name in SLICES if environment.get(name)]
  if given and len(given) < len(SLICES):
    raise StartError(f"{' and '.join(given)} is set without {' and '.join(n for n in SLICES if n not in given)}; a job of "
                     "several TPU slices needs all three on every host.")


def from_jax(environment: Mapping[str, str], seconds: float) -> Cluster | None:
  """The cluster that jax recognises: SLURM steps, TPU pods (by their metadata), MPI; None for one process.

  jax gives a process under SLURM or MPI the one GPU that has its local number, even where it is alone on its node or
  sees but one GPU: there, all that it sees.

  Raises:
    StartError: jax recognises one and cannot read it.
  """
  from jax._src.clusters import ClusterEnv  # the only place where jax says what it would join before joining it
  # A pod is not a job of several: jax would ask Kubernetes about any pod, and fail in most.
  kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method and (
      kind.__name__ != "K8sCluster" or "JOB_COMPLETION_INDEX" in environment)]
  try:
    if not any(kind.is_env_present() for kind in kinds):
      return None
    address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(seconds))
  except Exception as e:  # metadata servers and name services fail in many ways
    raise StartError(f"The processes of this job could not be found out ({' '.join(str(e).split())}); set {', '.join(OURS)} "
                     "on every process, or FGD_NUM_PROCESSES=1 for one.") from e
  if count is None or count <= 1:
    return None
  alone = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0] == "1"
  bound = len(environment.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
  return Cluster(str(address), count, int(index or 0), None if devices is None or alone or bound else list(devices))


def roll_call(cluster: Cluster, about: Mapping[str, Any], seconds: float) -> None:
  """Returns in all processes when all are there and agree.

  Args:
    cluster: of this process.
    about: what must be equal everywhere (the config, versions), by key.
    seconds: after which the missing processes are named.

  Raises:
    StartError: processes that are missing, unequal or there twice; the same sentence in all that came.
  """
  until = time.monotonic() + seconds
  message = {"process": cluster.process, "processes": cluster.processes, "host": socket.gethostname(), "about": dict(about)}
  if cluster.process:
    _call_in(cluster, message, until, seconds)
  else:
    _answer(cluster, message, until, seconds)


def _address(text: str) -> tuple[str, int]:
  host, colon, port = text.rpartition(":")
  if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise StartError(f"The coordinator {text!r} must be host:port, such as 10.0.0.1:8476.")
  return host.strip("[]"), int(port)


def _call_in(cluster: Cluster, message: Mapping[str, Any], until: float, seconds: float) -> None:
  host, port = _address(cluster.coordinator)
  reason = ""
  while True:
    left = until - time.monotonic()
    if left <= 0:
      raise StartError(f"Process {cluster.process} of {cluster.processes} (host {message['host']}) got no answer from "
                       f"process 0 at {cluster.coordinator} within {seconds:.0f} s ({reason}); see that it runs there and "
                       "that the port is open.")
    try:
      with socket.create_connection((host, port), timeout=min(left, 10)) as s:
        s.settimeout(left + 10)  # process 0 speaks first when its own time is up
        s.sendall(json.dumps(message).encode() + b"\n")
        answer = json.loads(s.makefile("rb").readline() or b"null")
    except (OSError, ValueError) as e:
      answer, reason = None, getattr(e, "strerror", None) or str(e)
    if isinstance(answer, dict):
      if answer.get("problem"):
        raise StartError(answer["problem"])
      return
    time.sleep(min(0.2, max(left, 0)))


def _answer(cluster: Cluster, own: Mapping[str, Any], until: float, seconds: float) -> None:
  _, port = _address(cluster.coordinator)
  with contextlib.ExitStack() as stack:
    try:
      dual = socket.has_dualstack_ipv6()
      server = stack.enter_context(socket.create_server(("", port), family=socket.AF_INET6 if dual else socket.AF_INET,
                                                        dualstack_ipv6=dual, backlog=1024))
    except OSError as e:
      raise StartError(f"Process 0 cannot listen on port {port} ({e.strerror}); another job has it, so give the coordinator "
                       "another port.") from e
    callers: dict[int, tuple[socket.socket, Mapping[str, Any]]] = {}
    waiting, problem = [], ""
    limit = until
    messages = _messages(server, stack, lambda: limit)
    for connection, message in messages:
      waiting.append(connection)
      problem = _contradiction(own, message, callers)
      if problem:
        break
      callers[message["process"]] = connection, message
      if len(callers) == cluster.processes - 1:
        break
    missing = sorted(set(range(1, cluster.processes)) - set(callers))
    if missing and not problem:
      problem = (f"{len(missing)} of {cluster.processes} processes did not come within {seconds:.0f} s: "
                 f"{_ranges(missing)} missing (process 0 is on host {own['host']}); start the same command on all of them, "
                 "and see that they reach "
                 f"{cluster.coordinator}.")
    answer = json.dumps({"problem": problem}).encode() + b"\n"
    limit = time.monotonic() + LATE_SECONDS if problem else 0.0
    for connection in itertools.chain(waiting, (connection for connection, _ in messages)):
      with contextlib.suppress(OSError):
        connection.settimeout(5)
        connection.sendall(answer)
  if problem:
    raise StartError(problem)


def _messages(server: socket.socket, stack: contextlib.ExitStack, until: Callable[[], float]
              ) -> Iterator[tuple[socket.socket, Mapping[str, Any]]]:
  """Connections that sent a first line that is ours, until the time is up; others (port scans) are dropped."""
  selector = stack.enter_context(selectors.DefaultSelector())
  selector.register(server, selectors.EVENT_READ)
  received: dict[Any, bytes] = {}
  while (left := until() - time.monotonic()) > 0:
    for key, _ in selector.select(left):
      if key.fileobj is server:
        connection, _ = server.accept()
        stack.enter_context(connection)
        connection.settimeout(5)
        selector.register(connection, selectors.EVENT_READ)
        received[connection] = b""
        continue
      connection = key.fileobj  # type: ignore[assignment]
      try:
        chunk = connection.recv(1 << 16)
      except OSError:
        chunk = b""
      received[connection] += chunk
      if chunk and not received[connection].endswith(b"\n") and len(received[connection]) < 1 << 20:
        continue
      selector.unregister(connection)
      try:
        message = json.loads(received.pop(connection))
        yield connection, {key: message[key] for key in ("process", "processes", "host", "about")}
      except (ValueError, KeyError, TypeError):
        connection.close()


def _contradiction(own: Mapping[str, Any], other: Mapping[str, Any], callers: Mapping[int, Any]) -> str:
  """What makes a caller unfit for this run, or ""."""
  who = f"Process {other['process']} (host {other['host']})"
  if other["processes"] != own["processes"]:
    return f"{who} expects {other['processes']} processes and process 0 expects {own['processes']}; start all alike."
  if not isinstance(other["process"], int) or not 0 < other["process"] < own["processes"]:
    return f"{who} is not one of the processes 1 to {own['processes'] - 1}; give every process an index of its own."
  if other["process"] in callers and not _gone(callers[other["process"]][0]):  # a process may have been started again
    first = callers[other["process"]][1]["host"]
    return f"{who} is there twice, also on host {first}; give every process an index of its own."
  mine, theirs = own["about"], other["about"]
  for key in sorted(set(mine) | set(theirs)):
    if mine.get(key) != theirs.get(key):
      return (f"{who} has {key}={theirs.get(key)!r} and process 0 has {mine.get(key)!r}; all processes of a run need the "
              "same.")
  return ""


def _gone(connection: socket.socket) -> bool:
  try:
    connection.setblocking(False)
    return not connection.recv(1)
  except BlockingIOError:
    return False
  except OSError:
    return True


def _ranges(numbers: Iterable[int]) -> str:
  """[1, 2, 3, 7] -> "1-3, 7"."""
  runs: list[list[int]] = []
  for n in numbers:
    if runs and n == runs[-1][1] + 1:
      runs[-1][1] = n
    else:
      runs.append([n, n])
  return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
