"""Compiles the real training round for accelerators that are not there and reads where its transfers stand.

    python -m fgd_jax.aot --config=configs/llama_1p5b.py --topology=v5p:2x2x4 --config.mesh.fsdp=2

    report = aot.compile_round(config, "v5e:2x4")
    report.exposed_mix1_bytes     0: everything that Mix1 sends is in flight while the inner steps run

The program is the one the trainer runs (`build_round` with the same arguments), compiled by the accelerator's own compiler.
What is read is the compiler's order of instructions, not a timing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from fgd_jax import config as configs
from fgd_jax.aot import schedule, targets
from fgd_jax.aot.hlo import Devices
from fgd_jax.aot.schedule import BLOCKING, EXPOSED, IN_SCAN, OVERLAPPED, Collective, Schedule
from fgd_jax.aot.targets import TargetError
from fgd_jax.methods import Method
from fgd_jax.workers import Workers, slice_of

__all__ = ["AotError", "Collective", "Report", "Schedule", "TargetError", "compile_round", "inner_scope", "read_round"]

# Read by libtpu and XLA when they are loaded, so they stand in the environment of the compiling process.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",              # the target's devices come from a topology, none is opened
    "TPU_SKIP_MDS_QUERY": "1",           # libtpu: do not ask the cloud's metadata server where we are
    "TPU_WORKER_HOSTNAMES": "localhost",  # libtpu: nor warn that it does not know
    "TPU_ACCELERATOR_TYPE": "",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",   # several compilations may run at once
    "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3",
}


class AotError(RuntimeError):
  """The round was not compiled; the message is one sentence, with the compiler's last lines after an abort."""


@dataclasses.dataclass(frozen=True)
class Report:
  """What the compiler made of a round. Bytes are those of the device that sends most, in one round.

  Attributes:
    topology, slices: the target. round: number of the round.
    mesh: axis sizes of the devices in use; devices_available: of the target.
    workers, method, form: M; name of the method; form of overlap ("barrier", "packed", "ring", "host").
    xla_options: options given to the compiler.
    overlapped_bytes: cross-worker operands in flight while inner steps run.
    exposed_mix1_bytes: what Mix1 sends in any other place.
    blocking_mix2_bytes: what is sent after the inner steps and waited for; of a switch, the largest branch.
    in_scan: collectives over workers inside the loop of inner steps that are not Mix1's hops: how many, bytes a round.
    share_overlapped: overlapped share of all cross-worker bytes (0 without any); share_mix1_overlapped: of Mix1's.
    expected_mix1_bytes: what Mix1 should send by algebra; None where it cannot be computed.
    collectives: every cross-worker collective, see `Collective`.
    peak_bytes_per_device: arguments + outputs + temporaries - aliased (donated) + generated code.
    memory: the compiler's figures behind it, bytes.
    parameters: of one worker's model.
    instructions: of all computations of the optimized program.
    compile_seconds: XLA's part; compile_cpu_seconds: of all its threads; lower_seconds: tracing and lowering before it.
    notes: sentences that the reader should know.
    schedule: positions behind the figures, for the picture.
    hlo: the optimized program.
  """

  topology: str
  slices: int
  round: int
  mesh: dict[str, int]
  devices_available: int
  workers: int
  method: str
  form: str
  xla_options: dict[str, str]
  overlapped_bytes: float
  exposed_mix1_bytes: float
  blocking_mix2_bytes: float
  in_scan: dict[str, float]
  share_overlapped: float
  share_mix1_overlapped: float | None
  expected_mix1_bytes: float | None
  collectives: tuple[Collective, ...]
  peak_bytes_per_device: int
  memory: dict[str, int]
  parameters: int
  instructions: int
  compile_seconds: float
  compile_cpu_seconds: float
  lower_seconds: float
  jax: str
  notes: tuple[str, ...]
  schedule: Schedule = dataclasses.field(repr=False)
  hlo: str = dataclasses.field(repr=False)

  def as_dict(self) -> dict[str, Any]:
    """For JSON: everything but the program's text and the positions of its computations; `senders` are counted."""
    out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("hlo", "schedule")}
    collectives = [{**dataclasses.asdict(c), "senders": len(c.senders)} for c in self.collectives]
    return {**out, "collectives": collectives, "notes": list(self.notes), "scans": list(self.schedule.scans)}


def compile_round(config: ConfigDict, topology: str, slices: int = 1, xla_options: Mapping[str, str] | None = None,
                  round: int = 0) -> Report:
  """Compiles the (unmeasured) training round of a config for a target, in a process of its own.

  Args:
    config: as for the trainer; data are not read (vocabulary: model.vocab_size, or 256) and allow_cpu has no say.
    topology: "v5p:2x2x2", "h100:8", ...; slices: TPU slices of that shape.
    xla_options: besides, or instead of, the platform's.
    round: which round; programs differ where Mix1's permutation is chosen on the host.

  Raises:
    TargetError: an unknown target, or its compiler is not installed.
    ValueError: a config that cannot work, or a target with too few devices.
    AotError: the compiler failed.
  """
  target = targets.parse(topology, slices)
  targets.refuse_missing(target)
  request = {"config": configs.flat(config), "topology": topology, "slices": slices, "round": round,
             "xla_options": dict(xla_options or {})}
  with tempfile.TemporaryDirectory(prefix="fgd_jax_aot_") as folder:
    answer = _run(request, folder)
    with open(os.path.join(folder, "program.hlo")) as f:
      text = f.read()
  devices = Devices.of(*(answer.pop(key) for key in ("device_worker", "device_slice", "device_id")))
  found = schedule.read(text, devices, config.inner_steps, answer.pop("inner_scope"))
  return _report(answer, found, text, topology=topology, slices=slices, round=round, workers=config.workers,
                 method=config.method.name)


def read_round(text: str, workers: Workers, method: Method, inner_steps: int) -> Schedule:
  """Classifies the transfers of a round that was compiled here, on devices that are there.

  Args:
    text: `compiled.as_text()`.
    workers: with a mesh; method: of the round; inner_steps: H.
  """
  assert workers.mesh is not None
  axis = workers.mesh.axis_names.index("worker")
  shape = workers.mesh.devices.shape
  devices = Devices.of([index[axis] for index in itertools.product(*map(range, shape))],
                       [slice_of(d) for d in workers.devices], [d.id for d in workers.devices])
  return schedule.read(text, devices, inner_steps, inner_scope(method))


def inner_scope(method: Method) -> str:
  """Whose the nameless collectives inside the scan are."""
  return "mix1" if method.inner_grad is None else "mix2"


def _run(request: dict[str, Any], folder: str) -> dict[str, Any]:
  """The compiling process: request in, answer out."""
  with open(os.path.join(folder, "request.json"), "w") as f:
    json.dump(request, f)
  root = os.path.dirname(os.path.dirname(configs.__file__))  # the package as it is imported here
  path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
  done = subprocess.run([sys.executable, "-m", "fgd_jax.aot.program", folder],
                        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path}, stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT, text=True, errors="replace")
  path = os.path.join(folder, "answer.json")
  answer: dict[str, Any] = {}
  if os.path.exists(path):
    with open(path) as f:
      answer = json.load(f)
  if done.returncode == 0 and answer:
    return answer
  if "error" in answer:
    raise (ValueError if done.returncode == 2 else AotError)(answer["error"])
  lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
  raise AotError(f"The compiling process {_ended(done.returncode)} on {request['topology']}; its last lines:\n"
                 + "\n".join(lines[-15:]))


def _ended(code: int) -> str:
  if code >= 0:
    return f"failed with exit status {code}"
  try:
    return f"was aborted by {signal.Signals(-code).name}"
  except ValueError:
    return f"was aborted by signal {-code}"


def _report(answer: dict[str, Any], found: Schedule, text: str, **names: Any) -> Report:
  overlapped, exposed, blocking = found.total(OVERLAPPED), found.total(EXPOSED), found.total(BLOCKING)
  inside = [c for c in found.collectives if c.placed == IN_SCAN]
  in_scan = {"collectives": len(inside), "bytes": found.total(IN_SCAN)}
  everything = overlapped + exposed + blocking + in_scan["bytes"]
  notes, used = [*answer.pop("notes"), *found.notes], 1
  for size in answer["mesh"].values():
    used *= size
  if used < answer["devices_available"]:
    notes.append(f"The mesh uses {used} of the target's {answer['devices_available']} devices.")
  memory = answer["memory"]
  peak = sum(memory.get(k, 0) for k in ("argument_size", "output_size", "temp_size", "generated_code_size"))
  return Report(
      overlapped_bytes=overlapped, exposed_mix1_bytes=exposed, blocking_mix2_bytes=blocking, in_scan=in_scan,
      share_overlapped=overlapped / everything if everything else 0.0,
      share_mix1_overlapped=overlapped / (overlapped + exposed) if overlapped + exposed else None,
      collectives=found.collectives, peak_bytes_per_device=peak - memory.get("alias_size", 0),
      instructions=found.instructions, notes=tuple(notes), schedule=found, hlo=text, **names, **answer)
