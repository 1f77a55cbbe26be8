"""No communication at all: M independent runs. The lower baseline of every table."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fgd_jax.methods.base import Method


@dataclasses.dataclass(frozen=True)
class Local(Method):
  """Every worker trains on its own shard and never exchanges anything."""

  outer_steps: ClassVar[bool] = False

  def land(self, z, w, x, ms, ctx):
    return w, ms
