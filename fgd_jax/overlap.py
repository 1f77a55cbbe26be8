"""In which form Mix1 hides behind the inner steps on which hardware, and the XLA options that it needs.

    packed    one collective on a worker's local shards in one buffer, the scan, a barrier on the raw result (round.py)
    barrier   the same with a collective for every leaf
    ring      a true mean as hops of a ring all-reduce inside the scan (mixing/ring.py)
    host      three executables; a second thread runs the collectives (host.py; CPU processes)

A form never changes the algorithm. What the compiler makes of it is shown by `python -m fgd_jax.aot`; the choices below
come from there.
"""

from __future__ import annotations

from typing import NamedTuple

from fgd_jax.methods import Fragmented, Method
from fgd_jax.mixing.ring import Ring
from fgd_jax.workers import Workers

FORMS = ("auto", "packed", "barrier", "ring", "host")

# Inside a slice an all-reduce runs beside TensorCore work only on the SparseCores, which these generations (v5p, v6e) have.
# On tpu7x the compiler keeps it beside the scan only where workers are not sharded.
_SPARSE_CORE: dict[str, str | bool] = {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"}
_SPARSE_CORE_KINDS = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
_UNSHARDED_ONLY = ("TPU7x",)

# On v5e the hops of a ring over 16 positions run beside the inner step, over 64 they do not (cause open).
_RING_SEEN = 64

# Permutations of many leaves are in flight together, instead of five.
_MANY_PERMUTES: dict[str, str | bool] = {"xla_max_concurrent_async_collective_permutes": "1000"}

# On GPU several buffers (stripes), or one beside a loop that has collectives of its own (a worker's fsdp), overlap only
# where several collectives may be in flight.
_PARALLEL_COLLECTIVES: dict[str, str | bool] = {"xla_gpu_experimental_parallel_collective_overlap_limit": "16"}


class Plan(NamedTuple):
  """How a round is compiled.

  Attributes:
    form: packed | barrier | ring | host, or none: nothing travels beside the inner steps.
    options: XLA compiler options.
    warning: a sentence where Mix1 is known to be exposed, else "".
    ring: the plan of the hops, in the ring form.
  """

  form: str
  options: dict[str, str | bool]
  warning: str = ""
  ring: Ring | None = None

  @property
  def packed(self) -> bool:
    """Whether leaves share buffers."""
    return self.form in ("packed", "ring")


def plan(form: str, method: Method, workers: Workers, steps: int) -> Plan:
  """The form for a bound method where its workers live, and the options to compile it with.

  Args:
    form: one of FORMS; "auto" chooses.
    method: bound to its workers.
    workers: with their mesh; its devices may be those of a topology that is only compiled for.
    steps: H.

  Raises:
    ValueError: a form that this method, mesh or H cannot have.
  """
  if form not in FORMS:
    raise ValueError(f"overlap.form={form!r} must be one of {', '.join(FORMS)}.")
  steps = method.delay_of(steps) if isinstance(method, Fragmented) else steps  # beside which a transfer can travel
  obstacle = {"host": _host_obstacle(method, workers), "ring": _ring_obstacle(method, workers, steps)}
  if obstacle.get(form):
    raise ValueError(f"overlap.form={form!r} is not possible here: {obstacle[form]}; use 'auto'.")
  mix1, devices = method.overlapped, workers.devices
  if form == "host":
    return Plan("host", {})
  if mix1 is None or workers.placement.devices == 1:
    return Plan("none", {})
  platform, kind = devices[0].platform, devices[0].device_kind
  mean = mix1.topology.bank[0].mean
  options = {}
  if platform == "tpu" and not mean:
    options = dict(_MANY_PERMUTES)
  elif platform == "tpu" and kind in _SPARSE_CORE_KINDS:
    options = dict(_SPARSE_CORE)
  elif platform == "gpu":
    options = dict(_PARALLEL_COLLECTIVES)
  ring = None if obstacle["ring"] else Ring(workers.placement.devices, steps)
  if form != "auto":
    return Plan(form, options, ring=ring if form == "ring" else None)
  if platform == "cpu":
    several = len({d.process_index for d in devices}) > 1
    return Plan("host" if several and not obstacle["host"] else "barrier", {})
  if mean and platform == "tpu" and (blocked := _psum_obstacle(kind, workers)):
    if ring is not None:
      if ring.hops_per_step == 2:
        return Plan("ring", {}, f"Mix1 may block in part: {steps} inner steps carry two hops each, of which the second was "
                    "seen to be exposed; python -m fgd_jax.aot shows it.", ring)
      warning = ("" if ring.positions < _RING_SEEN else
                 f"Mix1 may block: in a ring of {ring.positions} positions the hops were seen to be synchronous; "
                 "python -m fgd_jax.aot shows it.")
      return Plan("ring", {}, warning, ring)
    return Plan("packed", options, f"Mix1 blocks, wholly or in part: {blocked}, and its ring form is not possible "
                f"({obstacle['ring']}); a permutation (method.mix1='random_pairs') would overlap.")
  # A mean is packed because small leaves are not offloaded, several messages so that programs do not grow with their number;
  # one permutation needs no second copy of the parameters to send.
  one_message = max(len(p.terms) for p in mix1.topology.bank) == 1
  return Plan("barrier" if one_message and not mean and platform == "tpu" else "packed", options)


def _psum_obstacle(kind: str, workers: Workers) -> str:
  """Why an all-reduce over TPU workers does not run beside the inner steps, or ""."""
  slices = workers.slices
  if len(set(slices)) == len(slices):
    return ""  # between slices it is a transfer by the hosts
  if len(set(slices)) > 1:
    return "with several workers in each of several slices, the part of an all-reduce inside a slice does not overlap"
  if kind not in _SPARSE_CORE_KINDS:
    return f"on {kind} an all-reduce inside a slice does not run beside the inner steps"
  if kind in _UNSHARDED_ONLY and workers.inner_axes:
    return f"on {kind} an all-reduce of sharded workers does not run beside the inner steps"
  return ""


def _host_obstacle(method: Method, workers: Workers) -> str:
  """Why the host form is not possible, or ""."""
  if workers.platform != "cpu":
    return f"it is for CPU processes, and these are {workers.platform} devices"
  if method.inner_grad is not None:
    return "the method has collectives in its inner steps"
  if isinstance(method, Fragmented):
    return "the method's fragments travel inside a round"
  if workers.inner_axes:
    return f"a worker is sharded over {dict(workers.inner_axes)}, whose collectives would come from two threads"
  return ""


def _ring_obstacle(method: Method, workers: Workers, steps: int) -> str:
  """Why the ring form is not possible, or ""."""
  mix1, positions = method.overlapped, workers.placement.devices
  if mix1 is None or not mix1.topology.bank[0].mean:
    return "only a Mix1 that is a true mean (mix1='global') goes round a ring"
  if mix1.codec is not None:
    return "compressed leaves cannot be summed on the way"
  if positions == 1:
    return "all workers are on one position of the mesh axis 'worker'"
  if workers.placement.slots > 1:
    return f"it needs one worker a position, and {workers.count} workers are on {positions}"
  if steps < positions - 1:
    name = "delay" if isinstance(method, Fragmented) else "inner_steps"
    return f"{name}={steps} is below workers - 1 = {positions - 1}, and every inner step carries at most two hops"
  return ""
