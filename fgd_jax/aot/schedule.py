"""Where a compiled round places its cross-worker collectives: beside the inner steps, or in their way.

A collective is *overlapped* when its start, with the operands, stands before the `while` of the inner steps and its done
after it, or, where steps are written out (and for the hops of a ring), when matrix products of a step stand between the two.
What Mix1 sends in any other place is *exposed*; what depends on the result of the inner steps (Mix2) is *blocking*. This is
the compiler's order of instructions, not a timing.

Mix1 and Mix2 are told apart by the named scopes `mix1` and `mix2`; where the compiler dropped them (combined collectives,
transfers between slices) by data: Mix1 does not depend on the scan, Mix2 does.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from fgd_jax.aot import hlo
from fgd_jax.aot.hlo import Devices, Instruction, Module

OVERLAPPED, EXPOSED, BLOCKING, IN_SCAN = "overlapped", "exposed", "blocking", "in scan"

_SCOPE = re.compile(r"(?:^|[/(])(mix\d*)(?=$|[/)])")
_INNER = re.compile(r"(?:^|[/(])inner\)*/while$")  # the scan itself, not a loop inside its body
_STEP = re.compile(r"(?:^|[/(])inner\)*/")
_PRODUCTS = re.compile(r"gemm|matmul|cublas|cudnn|conv|attention|triton|tpu_custom_call", re.IGNORECASE)
_HOPS = {"ALL_REDUCE": "all-reduce", "ONE_TO_ONE": "collective-permute", "ALL_GATHER": "all-gather",
         "REDUCE_SCATTER": "reduce-scatter", "ALL_TO_ALL": "all-to-all"}


@dataclasses.dataclass(frozen=True)
class Collective:
  """One instruction through which workers exchange something.

  Attributes:
    name: of the instruction that carries the operands.
    kind: all-reduce, collective-permute, ...; with "(between slices)" over the data-centre network, with "in
      conditional" or "in loop" when it is part of one.
    scope: "mix1", "mix2", ..., or "?" where neither name nor data tell.
    scope_from: "name" (named scope), "data" (dependence on the scan), "method" (nothing else crosses workers in the scan)
      or "" (unknown).
    bytes: operands on one device in one execution; all operands of a combined collective, the largest branch of a
      conditional.
    times: executions in a round.
    placed: "overlapped", "exposed", "blocking" or "in scan" (neither Mix1 nor overlapped, in the loop of inner steps).
    start_index, done_index: positions in the schedule, ENTRY's or, with in_scan, the loop body's.
    in_scan: whether it stands in the body of the loop of inner steps.
    senders: devices that hand something to another worker (by number in the mesh); the two halves of a permutation that
      runs partly between slices have different ones.
    asynchronous: whether start and done are two instructions.
  """

  name: str
  kind: str
  scope: str
  scope_from: str
  bytes: float
  times: int
  placed: str
  start_index: int
  done_index: int
  in_scan: bool
  asynchronous: bool
  senders: frozenset[int] = frozenset((0,))

  @property
  def total(self) -> float:
    """Bytes in a round."""
    return self.bytes * self.times


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The cross-worker collectives of a compiled round and its inner loops.

  Attributes:
    collectives: in the order of their start.
    scans: positions in ENTRY of the loops that hold inner steps.
    length: instructions of ENTRY (plain calls written out).
    busy: positions in ENTRY of instructions that compute.
    instructions: of all computations.
    notes: sentences for the reader, such as that there is no loop.
  """

  collectives: tuple[Collective, ...]
  scans: tuple[int, ...]
  length: int
  busy: tuple[int, ...]
  instructions: int
  notes: tuple[str, ...]

  def total(self, placed: str) -> float:
    """Bytes in a round that the device with most of them hands to the collectives in this place."""
    return _busiest((c.senders, c.total) for c in self.collectives if c.placed == placed)


def _busiest(parts: Iterable[tuple[frozenset[int], float]]) -> float:
  """Of (devices, bytes of each), the most that one device has."""
  by_device: dict[int, float] = collections.defaultdict(float)
  for devices, amount in parts:
    for device in devices:
      by_device[device] += amount
  return max(by_device.values(), default=0.0)


def read(text: str, devices: Devices, inner_steps: int = 1, inner_scope: str = "") -> Schedule:
  """Classifies the cross-worker collectives of a compiled round.

  Args:
    text: optimized HLO.
    devices: worker position and slice of every device of the mesh.
    inner_steps: trips of the scan, used where the text does not say.
    inner_scope: whose the collectives inside the scan are if they carry no name ("mix1" for methods without a gradient
      exchange).
  """
  return _Reader(hlo.parse(text), devices, inner_steps, inner_scope).schedule()


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """A collective somewhere inside an instruction."""

  kind: str
  op_name: str
  bytes: float
  times: int
  senders: frozenset[int]


class _Reader:
  """One pass over a module; see `read`."""

  def __init__(self, module: Module, devices: Devices, inner_steps: int, inner_scope: str):
    self.module, self.devices = module, devices
    self.inner_steps, self.inner_scope = inner_steps, inner_scope
    self.notes: list[str] = []
    self._memory: dict[str, list[_Leaf]] = {}

  def schedule(self) -> Schedule:
    entry = self.module.flat(self.module.entry)
    if not self.module.scheduled:
      self.notes.append("The program is not marked as scheduled; the order of its instructions means little.")
    scans = [i for i, x in enumerate(entry) if self._holds_inner(x)]
    if not scans:
      named = any(_STEP.search(x.op_name) for x in self.module.within([self.module.entry]))
      loops = [] if named else [i for i, x in enumerate(entry) if x.op == "while"]
      weight = lambda i: sum(1 for _ in self.module.within(entry[i].called()))
      scans = [max(loops, key=weight)] if loops else []
      self.notes.append("No loop carries the name of the inner steps; the largest one is taken for it." if loops else
                        "The program has no loop of inner steps; a single one is written out in place." if named else
                        "The program has no loop, and nothing carries the name of inner steps.")
    found = self._level(entry, scans, 1)
    busy = tuple(i for i, x in enumerate(entry) if x.op in ("fusion", "convolution", "dot", "while", "conditional", "reduce",
                                                           "custom-call", "sort", "scatter", "gather"))
    return Schedule(tuple(found), tuple(scans), len(entry), busy, self.module.instructions, tuple(self.notes))

  # --- levels: ENTRY, and the bodies of loops around the scan --------------------------------------------------------

  def _level(self, level: list[Instruction], scans: Sequence[int], times: int) -> list[Collective]:
    """Collectives of a computation that holds the scans at these positions; and those inside the scans."""
    out: list[Collective] = []
    after = self._after(level, scans)
    for index, x in enumerate(level):
      if index in scans:
        body = self.module.flat(x.attribute("body"))
        inner = [i for i, y in enumerate(body) if self._holds_inner(y)]
        trips = hlo.trip_count(self.module, x)
        # Several workers in turn, or the fragments of a streaming method, whose few steps may be written out.
        if not _INNER.search(x.op_name) and (inner or any(map(self._step, body))):
          out += self._level(body, inner, times * (trips or 1))
        else:
          out += self._scan(body, times * (trips or self.inner_steps))
        continue
      leaves = self._leaves(x, level)
      if not leaves:
        continue
      start, done = self._span(level, index)
      scope, source = self._scope(x, level[done], leaves)
      if not scope and after:
        scope, source = ("mix2" if x.name in after else "mix1"), "data"
      beside = any(start < s < done for s in scans) or any(
          self._step(y) and self._multiplies(y) for y in level[start + 1:done])
      if start < done and beside:
        placed = OVERLAPPED
      else:
        placed = EXPOSED if scope in ("", "mix1") else BLOCKING
      out.append(self._collective(x, leaves, scope, source, placed, start, done, times, in_scan=False))
    return out

  def _scan(self, body: list[Instruction], times: int) -> list[Collective]:
    """Collectives in the body of the loop of inner steps."""
    out = []
    for index, x in enumerate(body):
      leaves = self._leaves(x, body)
      if not leaves:
        continue
      start, done = self._span(body, index)
      scope, source = self._scope(x, body[done], leaves)
      if not scope and self.inner_scope:
        scope, source = self.inner_scope, "method"
      beside = any(self._multiplies(y) for y in body[start + 1:done])
      placed = IN_SCAN if scope != "mix1" else OVERLAPPED if beside else EXPOSED
      out.append(self._collective(x, leaves, scope, source, placed, start, done, times, in_scan=True))
    return out

  def _collective(self, x, leaves, scope, source, placed, start, done, times, in_scan) -> Collective:
    kinds = collections.Counter(leaf.kind for leaf in leaves)
    kind = ", ".join(k if n == 1 else f"{n} x {k}" for k, n in kinds.items())
    kind += {"conditional": " in conditional", "while": " in loop"}.get(x.op, "")
    return Collective(x.name, kind, scope or "?", source, _most(leaves), times, placed, start, done, in_scan,
                      start != done, frozenset().union(*(leaf.senders for leaf in leaves)))

  # --- start and done --------------------------------------------------------------------------------------------

  def _span(self, level: list[Instruction], index: int) -> tuple[int, int]:
    """Positions at which a transfer starts with its operands and at which it is waited for; equal when synchronous."""
    x = level[index]
    if x.op == "send":
      return self._transfer(level, index)
    if not (x.op in hlo.STARTS or x.op in ("async-start", "call-start") or x.name.startswith("async-collective-start")):
      return index, index
    if '"is_sync":true' in x.attributes:
      return index, index
    chain, start, done = {x.name}, index if self._carries(x, level, set()) else None, index
    for later in range(index + 1, len(level)):
      y = level[later]
      if not chain.intersection(y.operands):
        continue
      if y.op.endswith("-update"):
        start = later if start is None and self._carries(y, level, chain) else start
        chain.add(y.name)
      elif y.op == "get-tuple-element":
        chain.add(y.name)
      elif y.op.endswith("-done") or "async-collective-done" in y.name:
        done = later
        break
    return (index if start is None else start), done

  def _transfer(self, level: list[Instruction], index: int) -> tuple[int, int]:
    """A send and its receive: both must be started, and what was received is waited for."""
    send = level[index]
    partner = next((i for i, y in enumerate(level) if y.op == "recv" and self._paired(send, y)), None)
    waits = send if partner is None else level[partner]
    done = next((i for i, y in enumerate(level) if y.op in ("recv-done", "send-done") and waits.name in y.operands), index)
    return max(index, index if partner is None else partner), done

  @staticmethod
  def _paired(send: Instruction, recv: Instruction) -> bool:
    meeting = send.attribute("_xla_host_transfer_rendezvous")
    if meeting:
      return meeting == recv.attribute("_xla_host_transfer_rendezvous")
    return send.attribute("channel_id") == recv.attribute("channel_id")

  def _carries(self, x: Instruction, level: list[Instruction], chain: set[str]) -> bool:
    """Whether an instruction has operands with data, besides the handle of the chain that it continues."""
    types = self._types(level)
    return any(o not in chain and hlo.size(types.get(o, "f32[]")) > 0 for o in x.operands)

  # --- which mixer -----------------------------------------------------------------------------------------------

  def _scope(self, x: Instruction, done: Instruction, leaves: list[_Leaf]) -> tuple[str, str]:
    for name in (x.op_name, done.op_name, *(leaf.op_name for leaf in leaves)):
      found = _SCOPE.search(name)
      if found:
        return found.group(1), "name"
    return "", ""

  def _after(self, level: list[Instruction], scans: Sequence[int]) -> set[str]:
    """Names of the instructions that need a result of the scans (a receive needs what its partner sends)."""
    types = self._types(level)
    tainted = {level[i].name for i in scans} | {y.name for y in level if self._step(y)}
    sends = [y for y in level if y.op == "send"]
    partner = {y.name: [s.name for s in sends if self._paired(s, y)] for y in level if y.op == "recv"}
    while True:
      before = len(tainted)
      for y in level:
        needs = [o for o in (*y.operands, *partner.get(y.name, [])) if not types.get(o, "").startswith("token")]
        if not tainted.isdisjoint(needs):
          tainted.add(y.name)
      if len(tainted) == before:
        return tainted

  # --- what an instruction holds ---------------------------------------------------------------------------------

  def _leaves(self, x: Instruction, level: list[Instruction]) -> list[_Leaf]:
    """The cross-worker collectives that an instruction is or holds; of a conditional, those of its largest branch."""
    if x.op in hlo.COLLECTIVES or x.op in hlo.STARTS or x.op == "send":
      senders = hlo.senders(x, self.devices)
      if not senders:
        return []
      types = self._types(level)
      operands = x.operands[:1] if x.op == "send" else x.operands
      return [_Leaf(_kind(x), x.op_name, sum(hlo.size(types.get(o, "")) for o in operands), 1, senders)]
    if "async-collective-done" in x.name or x.op == "parameter":
      return []
    parts = [self._computation(c) for c in x.called() if c in self.module.computations]
    if x.op == "conditional" and self._by_slice(x, level):
      here = lambda n: frozenset(i for i, s in enumerate(self.devices.slice_of) if s == n)
      parts = [[dataclasses.replace(leaf, senders=leaf.senders & here(n)) for leaf in p] for n, p in enumerate(parts)]
    elif x.op == "conditional":
      return max(parts, key=_most, default=[])
    leaves = [leaf for part in parts for leaf in part]
    if x.op == "while" and leaves:
      trips = hlo.trip_count(self.module, x) or 1
      leaves = [dataclasses.replace(leaf, times=leaf.times * trips) for leaf in leaves]
    return leaves

  def _by_slice(self, x: Instruction, level: list[Instruction]) -> bool:
    """Whether a conditional has a branch for each slice, because their permutations differ."""
    by_name = {y.name: y for y in level}
    y = by_name.get(x.operands[0])
    while y is not None and y.op in ("copy", "bitcast", "convert", "clamp"):
      y = by_name.get(y.operands[1 if y.op == "clamp" else 0])
    return y is not None and y.attribute("custom_call_target") == "SliceId"

  def _computation(self, name: str) -> list[_Leaf]:
    if name not in self._memory:
      self._memory[name] = []
      level = self.module.computations[name]
      self._memory[name] = [leaf for x in level for leaf in self._leaves(x, level)]
    return self._memory[name]

  def _types(self, level: list[Instruction]) -> dict[str, str]:
    key = id(level)
    if getattr(self, "_typed", (None, {}))[0] != key:
      self._typed = (key, {x.name: x.type for x in level})
      self._typed_level = level  # keeps the id valid
    return self._typed[1]

  def _holds_inner(self, x: Instruction) -> bool:
    """Whether this is the loop of inner steps, or a loop around it, or around steps that are written out."""
    if x.op != "while":
      return False
    return bool(_INNER.search(x.op_name)) or any(
        self._step(y) or (y.op == "while" and _INNER.search(y.op_name)) for y in self.module.within([x.attribute("body")]))

  @staticmethod
  def _step(x: Instruction) -> bool:
    """Whether an instruction is part of an inner step, by its name."""
    return bool(_STEP.search(x.op_name))

  def _multiplies(self, x: Instruction) -> bool:
    """Whether an instruction does work worth hiding a transfer behind: matrix products, or a loop."""
    if x.op in ("while", "dot", "convolution"):
      return True
    if x.op == "custom-call":
      return bool(_PRODUCTS.search(x.attribute("custom_call_target")))
    return x.op == "fusion" and any(self._multiplies(y) for y in self.module.within(x.called()))


def _most(leaves: list[_Leaf]) -> float:
  return _busiest((leaf.senders, leaf.bytes * leaf.times) for leaf in leaves)


def _kind(x: Instruction) -> str:
  if x.op != "send":
    return x.op.removesuffix("-start")
  if "is_host_transfer=true" not in x.attributes:
    return "send/recv"
  return _HOPS.get(x.attribute("_xla_megascale_transfer_type"), "send/recv") + " (between slices)"
