"""Several processes, one run: a start that cannot hang silently, decisions taken together, and waits with time limits.

Everything here is for the hosts: small facts travel through jax's coordination service, not over the devices. With one
process all of it does nothing. Which processes there are: cluster.py.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from absl import flags, logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fgd_jax import cluster
from fgd_jax.cluster import StartError

T = TypeVar("T")
HEARTBEAT = 60  # seconds after which a process that died is noticed
STALLED = 3     # exit status where a time limit ended the process
_names = itertools.count()


class PeerError(RuntimeError):
  """Another process of the run stopped, or did not come, in one sentence."""


def start(about: Mapping[str, Any], seconds: float) -> None:
  """Joins the processes of this run; without several of them, or when they are joined already, does nothing.

  Call it before jax's devices are used.

  Args:
    about: what must be equal in all processes (config, versions), by key.
    seconds: after which missing processes are named.

  Raises:
    StartError: one sentence, the same in all processes that came.
  """
  if jax.distributed.is_initialized():
    return
  found, remark = cluster.from_environment(os.environ)
  if remark:
    logging.warning("%s", remark)
  elif found is None:
    found = cluster.from_jax(os.environ, seconds)
  if found is None or found.processes == 1:
    return
  began = time.monotonic()
  cluster.roll_call(found, {**about, "jax": jax.__version__}, seconds)
  with Watch(seconds) as watch:
    watch.at(f"Process {found.process} of {found.processes} found all others, but jax.distributed did not start with the "
             f"coordinator {found.coordinator}")
    jax.distributed.initialize(found.coordinator, found.processes, found.process, found.local_devices,
                               cluster_detection_method="deactivate", initialization_timeout=int(seconds) + 60,
                               heartbeat_timeout_seconds=HEARTBEAT)
  if "experimental_orbax_use_distributed_barrier" in flags.FLAGS:  # orbax's barriers on the devices have no time limit
    flags.FLAGS["experimental_orbax_use_distributed_barrier"].value = True
  logging.info("All %d processes are there (%.1f s).", found.processes, time.monotonic() - began)
  if not leader():
    logging.set_verbosity(logging.WARNING)


def index() -> int:
  """The number of this process; needs no device."""
  return jax._src.distributed.global_state.process_id


def count() -> int:
  """How many processes there are; needs no device."""
  return jax._src.distributed.global_state.num_processes


def leader() -> bool:
  """Whether this process writes what only one may write."""
  return index() == 0


# --- decisions taken together ----------------------------------------------------------------------------------------


def by_leader(what: str, work: Callable[[], T], seconds: float) -> T:
  """The result of `work`, done by process 0 alone; it must be plain JSON. Its error is everybody's error.

  Raises:
    PeerError: process 0 failed or gave no answer within `seconds`. In process 0 itself, what `work` raised.
  """
  if count() == 1:
    return work()
  key = f"fgd_jax/{next(_names)}"
  if leader():
    try:
      out = work()
    except Exception as e:
      _client().key_value_set(key, json.dumps({"problem": _sentence(e)}))
      raise
    _client().key_value_set(key, json.dumps({"out": out}))
    return out
  try:
    answer = json.loads(_client().blocking_key_value_get(key, int(1000 * seconds)))
  except jax.errors.JaxRuntimeError as e:
    raise PeerError(f"Process 0 did not answer within {seconds:.0f} s ({what}).") from e
  if "problem" in answer:
    raise PeerError(answer["problem"])
  return answer["out"]


def together(what: str, work: Callable[[], T], seconds: float, same: Callable[[T], Any] | None = None) -> T:
  """Does `work` in every process and goes on when it is done in all; where it failed in one, all of them stop.

  Args:
    what: for messages.
    same: of the result, plain JSON that must be equal everywhere.
    seconds: that the processes wait for each other.

  Raises:
    PeerError: another process failed, did not come in time, or has another result. What `work` raised, here.
  """
  if count() == 1:
    return work()
  folder, error, problem, out = f"fgd_jax/{next(_names)}/", None, "", None
  try:
    out = work()
    fact = None if same is None else same(out)
  except Exception as e:
    error, problem, fact = e, _sentence(e), None
  _client().key_value_set(f"{folder}{index()}", json.dumps({"problem": problem, "fact": fact}))
  try:
    _client().wait_at_barrier(folder.rstrip("/"), int(1000 * seconds))
  except jax.errors.JaxRuntimeError as e:
    there = {int(key.rsplit("/", 1)[1]) for key, _ in _client().key_value_dir_get(folder)}
    missing = ", ".join(str(i) for i in range(count()) if i not in there) or "none"
    raise error or PeerError(f"The processes did not come together within {seconds:.0f} s ({what}); missing: process "
                             f"{missing}.") from e
  if error is not None:
    raise error
  answers = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in _client().key_value_dir_get(folder)}
  for i, answer in sorted(answers.items()):
    if answer["problem"]:
      raise PeerError(f"Process {i} stopped: {answer['problem']}")
    if answer["fact"] != answers[0]["fact"]:
      raise PeerError(f"Process {i} differs from process 0 ({what}): {answer['fact']} instead of {answers[0]['fact']}; all "
                      "processes need the same.")
  return out  # type: ignore[return-value]


def shared_file(path: str, seconds: float) -> None:
  """Refuses a folder that is not the same for all processes: process 0 writes into a file there, the others read it.

  Raises:
    PeerError: this or another process does not see in time what process 0 wrote.
  """
  if count() == 1:
    return

  def mark() -> str:
    text = f"{os.getpid()} {time.time_ns()}"
    with open(path, "w", encoding="utf-8") as f:
      f.write(text)
    return text

  wanted = by_leader("a mark in the run's folder", mark, seconds)

  def look() -> None:
    until = time.monotonic() + seconds / 2  # network file systems show new files late
    while not _holds(path, wanted):
      if time.monotonic() > until:
        raise PeerError(f"{os.path.dirname(path)} is not shared: process {index()} does not see what process 0 wrote there; "
                        "use a --workdir that all hosts mount.")
      time.sleep(0.2)

  together("the run's folder", look, seconds)


def _holds(path: str, text: str) -> bool:
  try:
    with open(path, encoding="utf-8") as f:
      return f.read() == text
  except OSError:
    return False


def _client() -> Any:
  """jax's client of the coordination service, which has no public name."""
  return jax._src.distributed.global_state.client


def _sentence(e: Exception) -> str:
  return " ".join(str(e).split()) or type(e).__name__


# --- time limits -----------------------------------------------------------------------------------------------------


class Watch:
  """Ends the process with a sentence when something takes too long: a collective whose peer is gone cannot be interrupted.

  Args:
    seconds: from one `at` to the next; 0 is no limit.
  """

  def __init__(self, seconds: float):
    self._seconds, self._what, self._since = seconds, "", time.monotonic()
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name="time limit", daemon=True)

  def __enter__(self) -> "Watch":
    if self._seconds:
      self._thread.start()
    return self

  def __exit__(self, *unused: Any) -> None:
    self._closed.set()

  def at(self, what: str) -> None:
    """Something new begins: a sentence without its end, which says what is waited for."""
    self._what, self._since = what, time.monotonic()

  def _run(self) -> None:
    while not self._closed.wait(min(1.0, self._seconds / 4)):
      if time.monotonic() - self._since > self._seconds and self._what:
        print(f"{self._what} within {self._seconds:.0f} s; this process ends.", file=sys.stderr, flush=True)
        os._exit(STALLED)


def preflight(mesh: Mesh | None, seconds: float) -> None:
  """Adds up numbers over every mesh axis, with a time limit, before anything large is compiled.

  Raises:
    StartError: a wrong sum.
  """
  if mesh is None or mesh.size == 1:
    return
  names = mesh.axis_names
  processes = sorted({d.process_index for d in mesh.devices.flat})
  together("before the first all-reduce", lambda: None, seconds)
  with Watch(seconds) as watch:
    for axis, size in mesh.shape.items():
      if size == 1:
        continue
      watch.at(f"The first all-reduce over the mesh axis {axis!r} ({size} positions, processes {processes}) did not end, "
               "though all processes are there (see that the hosts reach each other on all ports and that their host names "
               "resolve to each other's network)")
      numbers = np.broadcast_to(1.0 + np.arange(size, dtype=np.float32).reshape(
          [size if name == axis else 1 for name in names]), tuple(mesh.shape.values()))
      x = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, PartitionSpec(*names)), lambda i: numbers[i])  # noqa: B023
      total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=PartitionSpec(*names),  # noqa: B023
                                    out_specs=PartitionSpec(*(n if n != axis else None for n in names))))(x)
      if {float(s.data.reshape(())) for s in total.addressable_shards} != {size * (size + 1) / 2}:
        raise StartError(f"The all-reduce over the mesh axis {axis!r} gave a wrong sum; a device or a link is broken.")


# --- told to stop ----------------------------------------------------------------------------------------------------

AT_ONCE = 0.5  # seconds in which several signals count as one
SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
_told: list[signal.Signals] = []  # since the rounds began
_running = threading.Event()      # rounds began


def heed_signals(last_words: Callable[[], str]) -> None:
  """What SIGTERM and Ctrl-C do to this process from now on; for commands, in the main thread.

  While rounds run the first one asks for a save (see `preempted`). A second one ends the process at once, unless it comes
  within AT_ONCE seconds (timeout(1) sends two: to the process and to its group), and so does the first one before the
  rounds, in a thread of its own: Python's handlers wait until a compilation or a round has ended. With several processes jax
  passes SIGTERM on to all of them, and Ctrl-C counts as SIGTERM.

  Args:
    last_words: what the same command will do, said where the process ends at once.
  """
  reading, writing = os.pipe()
  os.set_blocking(writing, False)
  for number in SIGNALS:
    if signal.getsignal(number) is not signal.SIG_IGN:  # a shell script's background processes ignore Ctrl-C
      signal.signal(number, lambda *_: None)
  signal.set_wakeup_fd(writing)
  threading.Thread(target=_heed, args=(reading, last_words), name="signals", daemon=True).start()


def _heed(reading: int, last_words: Callable[[], str]) -> None:
  first = -math.inf
  while True:
    number = os.read(reading, 1)[0]
    if number not in SIGNALS or time.monotonic() - first < AT_ONCE:
      continue
    if _told or not (_running.is_set() or count() > 1):
      print(f"\nEnded at once ({SIGNALS[signal.Signals(number)]}). {last_words()}", file=sys.stderr, flush=True)
      os._exit(128 + number)
    _told.append(signal.Signals(number))
    first = time.monotonic()
    if count() > 1:
      os.kill(os.getpid(), signal.SIGTERM)
    logging.warning("Told to stop (%s): the round that runs is finished and saved; told again, it ends at once.",
                    SIGNALS[_told[0]])


def preempted(rounds: int) -> bool:
  """Whether this round, the same in all processes, is the one to save and stop at, since one of them was told to stop."""
  _running.set()
  return bool(_told) if count() == 1 else multihost_utils.reached_preemption_sync_point(rounds)


def stopped_by() -> signal.Signals:
  """The signal that told the run to stop."""
  return _told[0] if _told and count() == 1 else signal.SIGTERM


# --- platform and end ------------------------------------------------------------------------------------------------


def refuse_silent_cpu() -> None:
  """Refuses to train on CPU where there is an accelerator that jax cannot use, unless JAX_PLATFORMS asks for CPU.

  Raises:
    StartError: one sentence; also where JAX_PLATFORMS names a platform that is not there.
  """
  asked = str(jax.config.jax_platforms or "")  # type: ignore[attr-defined]
  if not asked and _only_cpu():
    jax.config.update("jax_platforms", "cpu")
  try:
    platform = jax.devices()[0].platform
  except RuntimeError as e:
    raise StartError(f"jax cannot use JAX_PLATFORMS={asked!r} ({_sentence(e)[:300]}); install the extra for it (pip install "
                     "'.[tpu]' or '.[cuda]') or set JAX_PLATFORMS=cpu.") from e
  if platform != "cpu" or "cpu" in asked.split(","):
    return
  from jax._src import hardware_utils
  if hardware_utils.has_visible_nvidia_gpu():
    what, extra = "an NVIDIA GPU", "cuda"
  elif hardware_utils.num_available_tpu_chips_and_device_id()[0]:
    what, extra = "a TPU", "tpu"
  else:
    return
  raise StartError(f"This machine has {what} that jax does not use; install it with pip install '.[{extra}]', or set "
                   "JAX_PLATFORMS=cpu to train on CPU.")


def _only_cpu() -> bool:
  """Whether there is surely no TPU and no plugin for anything else: libtpu, which fgd_jax.aot needs, then only complains."""
  from jax._src import hardware_utils
  names = ("TPU_", "COLAB_TPU", "CLOUD_TPU", "MEGASCALE_", "JAX_FORCE_TPU_INIT", "PJRT_NAMES")
  own = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")  # that jax and libtpu set everywhere
  told = any(name.startswith(names) and name not in own for name in os.environ)
  plugins = importlib.util.find_spec("jax_plugins") or importlib.metadata.entry_points(group="jax_plugins")
  devices = glob.glob("/dev/accel*") or glob.glob("/dev/vfio*") or hardware_utils.num_available_tpu_chips_and_device_id()[0]
  return not (told or plugins or devices)


def finish() -> None:
  """Waits for the other processes to end as well."""
  if jax.distributed.is_initialized():
    jax.distributed.shutdown()
