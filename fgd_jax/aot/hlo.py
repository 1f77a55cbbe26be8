"""Reads optimized HLO as text: computations, instructions, sizes, and which devices talk to each other.

The text is what `jax.stages.Compiled.as_text()` returns. Nothing here needs jax or a compiler, so that every form that a
compiler was seen to print can be tested from a snippet.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

# Bits of an element (XLA's primitive types); tokens and opaque values carry nothing.
_BITS = {"pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
         "u32": 32, "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
         "f4e2m1fn": 4, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(")
_PARENTHESIS = re.compile(r"[()]")

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
               "collective-broadcast")
STARTS = tuple(kind + "-start" for kind in COLLECTIVES)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation: `%name = type op(operands), attributes`; `arguments` is the text between the brackets."""

  name: str
  op: str
  type: str
  operands: tuple[str, ...]
  arguments: str = ""
  attributes: str = ""
  root: bool = False

  @property
  def op_name(self) -> str:
    """JAX's name of the operation, with its named scopes; "" where the compiler dropped it."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found.group(1) if found else ""

  def called(self) -> list[str]:
    """Names of the computations that run as part of this instruction (not the reducers of collectives)."""
    if self.op in COLLECTIVES or self.op in STARTS or self.op.endswith(("-done", "-update")):
      return []
    found = re.findall(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", self.attributes)
    for names in re.findall(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}", self.attributes):
      found += _NAME.findall(names)
    return found

  def attribute(self, key: str) -> str:
    """The word after `key=`, "" if there is none: the name of a computation, a number, a quoted string."""
    found = re.search(rf'\b{key}=%?("[^"]*"|[\w.\-]+)', self.attributes)
    return found.group(1).strip('"') if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program: instructions of each computation in the order in which they are scheduled."""

  computations: dict[str, list[Instruction]]
  entry: str
  scheduled: bool

  @property
  def instructions(self) -> int:
    """Instructions of all computations together."""
    return sum(len(c) for c in self.computations.values())

  def within(self, names: Iterable[str]) -> Iterable[Instruction]:
    """All instructions of these computations and of what they call, each computation once."""
    seen: set[str] = set()
    todo = [n for n in names if n in self.computations]
    while todo:
      name = todo.pop()
      if name in seen:
        continue
      seen.add(name)
      for instruction in self.computations[name]:
        yield instruction
        todo += [n for n in instruction.called() if n in self.computations]

  def flat(self, name: str) -> list[Instruction]:
    """The computation with plain calls written out in place, their parameters replaced by the call's operands."""
    return self._inline(name, "", ())[0]

  def _inline(self, name: str, prefix: str, arguments: Sequence[str]) -> tuple[list[Instruction], str]:
    renamed: dict[str, str] = {}
    out: list[Instruction] = []
    result = ""
    for i in self.computations[name]:
      operands = tuple(renamed.get(o, o) for o in i.operands)
      new = prefix + i.name
      if i.op == "parameter" and prefix:
        new = arguments[int(i.arguments)]
      elif i.op == "call" and (target := i.attribute("to_apply")) in self.computations:
        inner, new = self._inline(target, new + "/", operands)
        out += inner
      else:
        out.append(dataclasses.replace(i, name=new, operands=operands))
      renamed[i.name] = new
      result = new if i.root else result
    return out, result


def parse(text: str) -> Module:
  """Reads the text of a module.

  Raises:
    ValueError: text without an ENTRY computation.
  """
  text = re.sub(r"/\*.*?\*/", "", text)
  computations: dict[str, list[Instruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    if current is not None and line.startswith("}"):
      current = None
    elif current is not None and (found := _INSTRUCTION.match(line)):
      current.append(_instruction(found.group(2), line[found.end():], bool(found.group(1))))
    elif line.endswith("{") and (found := _HEADER.match(line)):
      current = computations.setdefault(found.group(2), [])
      entry = found.group(2) if found.group(1) else entry
  if not entry:
    raise ValueError("This is not the text of a compiled program: it has no ENTRY computation.")
  return Module(computations, entry, "is_scheduled=true" in text[:text.find("\n")])


def _instruction(name: str, rest: str, root: bool) -> Instruction:
  end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
  kind, rest = rest[:end], rest[end:].lstrip()
  opening = rest.find("(")
  closing = _closing(rest, opening)
  arguments = rest[opening + 1:closing - 1]
  return Instruction(name, rest[:opening], kind, tuple(_NAME.findall(arguments)), arguments, rest[closing:], root)


def _closing(text: str, opening: int) -> int:
  """Index behind the bracket that closes the one at `opening`."""
  depth = 0
  for found in _PARENTHESIS.finditer(text, opening):
    depth += 1 if found.group() == "(" else -1
    if depth == 0:
      return found.end()
  return len(text)


def size(type_text: str) -> float:
  """Bytes of a type, all elements of a tuple together, layout and padding left out.

  Raises:
    ValueError: a type that is not known.
  """
  total = 0.0
  for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", type_text)):
    bits = _BITS.get(dtype, 8 if dtype.startswith("f8") else None)
    if bits is None:
      raise ValueError(f"Unknown element type {dtype!r} in the program.")
    total += bits / 8 * math.prod(int(d.replace("<=", "")) for d in dims.split(",") if d)
  return total


def trip_count(module: Module, loop: Instruction) -> int | None:
  """How often a `while` runs its body, if the text says so: XLA's own count, or a comparison with one constant."""
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if known:
    return int(known.group(1))
  condition = list(module.within([loop.attribute("condition")]))
  limits = [i.arguments for i in condition if i.op == "constant" and i.type.startswith(("s32[]", "u32[]", "s64[]"))]
  compares = [i for i in condition if i.op == "compare" and "direction=LT" in i.attributes]
  return int(limits[0]) if len(limits) == 1 and len(compares) == 1 and limits[0].isdigit() else None


# --- who talks to whom -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Devices:
  """The mesh as the program numbers it: entry i is the i-th device of `mesh.devices.flat`.

  Attributes:
    worker: worker position of each device.
    slice_of: slice of each device, from 0 (0 for all where there is one).
    ids: jax's number of each device; where there are several slices it is (slice + 1) * 100000 + number in the slice.
  """

  worker: tuple[int, ...]
  slice_of: tuple[int, ...]
  ids: tuple[int, ...]

  @classmethod
  def of(cls, worker: Sequence[int], slice_of: Sequence[int] | None = None, ids: Sequence[int] | None = None) -> "Devices":
    """Without `ids`, the devices of each slice are taken to stand in the mesh in the order of their numbers."""
    slices = tuple(slice_of) if slice_of else (0,) * len(worker)
    counted = [(s + 1) * 100_000 + slices[:i].count(s) for i, s in enumerate(slices)]
    return cls(tuple(worker), slices, tuple(ids or counted))

  def everywhere(self, groups: list[list[int]]) -> list[list[int]]:
    """Groups as the program writes them -> groups of the mesh's devices; [] are all devices.

    A program for several slices numbers the devices of its own slice from 0: its groups then stand for every slice.
    """
    count, slices = len(self.worker), len(self.slices)
    if not groups:
      return [list(range(count))]
    if slices > 1 and max((i for g in groups for i in g), default=0) < count // slices:
      return [[members[i] for i in g] for members in self.slices for g in groups]
    return groups

  @functools.cached_property
  def slices(self) -> list[list[int]]:
    """The devices of each slice, in the order of the mesh."""
    return [[i for i, s in enumerate(self.slice_of) if s == number] for number in sorted(set(self.slice_of))]

  def senders(self, groups: list[list[int]]) -> frozenset[int]:
    """The devices in groups of more than one worker."""
    return frozenset(i for g in groups if len({self.worker[i] for i in g}) > 1 for i in g)


def senders(instruction: Instruction, devices: Devices) -> frozenset[int]:
  """The devices that hand something to another worker in a collective or a send; empty when it stays inside workers."""
  text = instruction.attributes
  if instruction.op == "send":
    return _transfer_senders(text, devices)
  pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text)
  if pairs:
    return frozenset(p[0] for p in devices.everywhere(_braces(pairs.group(1))) if devices.senders([p]))
  if "use_global_device_ids=true" not in text and instruction.op.removesuffix("-start") in (
      "all-reduce", "all-gather", "reduce-scatter"):  # groups of replicas, of which there is one: all devices, or none
    return devices.senders(devices.everywhere([])) if "channel_id=" in text else frozenset()
  return devices.senders(devices.everywhere(replica_groups(text)))


def _braces(text: str) -> list[list[int]]:
  return [[int(i) for i in g.split(",") if i.strip()] for g in re.findall(r"\{([\d,\s]*)\}", text)]


def replica_groups(attributes: str) -> list[list[int]]:
  """The groups of a collective in any of XLA's notations; [] means all devices.

  `{{0,1},{2,3}}` · `[4,2]<=[8]` · `[2,4]<=[4,2]T(1,0)` · `mesh['worker'=4,'fsdp'=2] {'worker'}`.
  """
  text = attributes[attributes.find("replica_groups="):] if "replica_groups=" in attributes else ""
  text = text.removeprefix("replica_groups=")
  if text.startswith("{"):
    return _braces(re.match(r"\{((?:\{[\d,\s]*\},?\s*)*)\}", text).group(1))  # type: ignore[union-attr]
  iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
  if iota:
    return _iota(iota.group(2), iota.group(3)).reshape(_numbers(iota.group(1))).tolist()
  mesh = re.match(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\))?\s*\{([^}]*)\}", text)
  if not mesh:
    return []
  axes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))}
  ids = np.arange(int(np.prod(list(axes.values()))))
  order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+))?", mesh.group(2) or "")
  if order:
    ids = _iota(order.group(1), order.group(2)).ravel()
  elif mesh.group(2):
    ids = np.asarray(_numbers(mesh.group(2)))
  shape: list[int] = []
  chosen: list[int] = []
  wanted = {name: (int(pre or 1), int(part or 0)) for name, pre, part in re.findall(
      r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh.group(3))}
  for name, length in axes.items():  # an axis may be used in part: 'x':(before)size
    before, part = wanted.get(name, (1, 1))
    part = part or length
    if name in wanted:
      chosen.append(len(shape) + 1)
    shape += [before, part, length // before // part]
  grid = ids.reshape(shape)
  rest = [a for a in range(grid.ndim) if a not in chosen]
  members = int(np.prod([shape[a] for a in chosen], dtype=int))
  return grid.transpose(rest + chosen).reshape(-1, members).tolist()


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r"\d+", text)]


def _iota(dims: str, permutation: str | None) -> np.ndarray:
  grid = np.arange(int(np.prod(_numbers(dims)))).reshape(_numbers(dims))
  return grid.transpose(_numbers(permutation)) if permutation else grid


def _transfer_senders(text: str, devices: Devices) -> frozenset[int]:
  """Of a send: between slices (the target names devices by jax's numbers) or between GPUs."""
  device = {number: i for i, number in enumerate(devices.ids)}
  pairs = [(device[int(a)], device[int(b)]) for a, b in re.findall(r"\{(\d+)->(\d+)\}", text)]
  if pairs:
    return frozenset(a for a, b in pairs if devices.senders([[a, b]]))
  grids = re.findall(r"\{([\d,:]+)\}x\{([\d,:]+)\}", text)
  if grids:
    return devices.senders([[device[s * 100_000 + i] for s in _ranges(slices)]
                            for slices, indices in grids for i in _ranges(indices)])
  found = re.search(r"source_target_pairs=\"?\{((?:\{\d+,\d+\},?)*)\}", text)
  groups = devices.everywhere(_braces(found.group(1)) if found else [])
  return frozenset(g[0] for g in groups if devices.senders([g])) if found else devices.senders(groups)


def _ranges(text: str) -> list[int]:
  """ "0:3,7" -> [0, 1, 2, 3, 7]."""
  out: list[int] = []
  for part in text.split(","):
    first, _, last = part.partition(":")
    out += range(int(first), int(last or first) + 1)
  return out
