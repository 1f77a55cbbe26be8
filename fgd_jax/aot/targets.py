"""Names of targets, `v5p:2x2x2` or `h100:8`, and their devices, which need not be there."""

from __future__ import annotations

import dataclasses
import importlib.resources
import importlib.util
import re
from typing import Any

from fgd_jax.workers import slice_of

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPUS = {"h100": "h100.textproto"}  # XLA's GpuTargetConfig, approximate figures; a file of this package
EXAMPLES = "v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x1, h100:8 or h100:2x8"


class TargetError(ValueError):
  """A target that does not exist or cannot be compiled for here; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Target:
  """A topology by name.

  Attributes:
    name: as given.
    platform: "tpu" or "gpu".
    generation: "v5e", "h100", ...
    layout: TPU: chips along each axis of one slice; GPU: hosts and devices in each.
    slices: slices of a TPU (joined by the data-centre network); 1 for GPUs.
  """

  name: str
  platform: str
  generation: str
  layout: tuple[int, ...]
  slices: int = 1


def parse(name: str, slices: int = 1) -> Target:
  """Reads the name of a target.

  Raises:
    TargetError: a name that is none.
  """
  generation, _, layout = name.lower().partition(":")
  if generation in ("v7x", "tpuv7x", "tpu7"):
    raise TargetError(f"--topology={name}: this generation is called tpu7x here, as in tpu7x:2x2x1.")
  if generation not in (*TPUS, *GPUS) or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", layout):
    raise TargetError(f"--topology={name} is not a known target; use a name such as {EXAMPLES}.")
  if slices < 1:
    raise TargetError(f"--slices={slices} must be at least 1.")
  dims = tuple(int(n) for n in layout.split("x"))
  if generation in GPUS:
    if slices != 1:
      raise TargetError(f"--slices={slices} is for TPUs; name the hosts of GPUs in the topology, as in {generation}:2x8.")
    if len(dims) > 2:
      raise TargetError(f"--topology={name}: write {generation}:DEVICES or {generation}:HOSTSxDEVICES.")
    return Target(name, "gpu", generation, dims if len(dims) == 2 else (1, *dims))
  if len(dims) not in (2, 3):
    raise TargetError(f"--topology={name}: write the chips along each axis of the slice, such as {EXAMPLES}.")
  return Target(name, "tpu", generation, dims, slices)


def refuse_missing(target: Target) -> None:
  """Stops where the compiler for a target is not installed, naming the packages.

  Raises:
    TargetError: libtpu or the GPU plugin is missing.
  """
  if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
    raise TargetError(f"--topology={target.name} needs the TPU compiler libtpu; pip install '.[aot]'.")
  if target.platform == "gpu" and not any(_found(f"jax_plugins.xla_cuda{n}") for n in (12, 13)):
    raise TargetError(f"--topology={target.name} needs the GPU compiler, two wheels without their dependencies: pip install "
                      "--no-deps jax-cuda12-plugin jax-cuda12-pjrt, in the version of jaxlib.")


def _found(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:
    return False


def devices(target: Target) -> list[Any]:
  """The devices of a target, sorted by slice and number. Loads the compiler, which may abort the process.

  Raises:
    TargetError: the compiler does not know the topology.
  """
  from jax.experimental import topologies  # not at import time: reading names needs no jax

  try:
    if target.platform == "gpu":
      config = importlib.resources.files("fgd_jax.aot").joinpath(GPUS[target.generation]).read_text()
      found = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=config,
                                           topology="x".join(str(n) for n in (1, *target.layout))).devices
    else:
      layout = "x".join(str(n) for n in target.layout)
      found = topologies.get_topology_desc(platform="tpu", topology_name=f"{target.generation}:{layout}",
                                           num_slices=target.slices).devices
  except Exception as e:  # jaxlib raises several types
    raise TargetError(f"--topology={target.name} with --slices={target.slices} was refused by the compiler: "
                      f"{' '.join(str(e).split())[:300]}") from e
  return sorted(found, key=lambda d: (slice_of(d), d.id))
