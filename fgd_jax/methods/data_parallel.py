"""Synchronous data parallelism: gradients are averaged in every inner step. The upper baseline of every table."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from fgd_jax.methods.base import Method
from fgd_jax.mixing import Context
from fgd_jax.mixing.codec import make_codec


@dataclasses.dataclass(frozen=True)
class DataParallel(Method):
  """g_m <- mean_j g_j before each inner update; workers stay identical, and no outer step is taken.

  Bytes are blocking and counted for all H all-reduces of a round.

  Args:
    codec: how gradients are compressed on the wire (`fgd_jax.mixing.codec`), without error feedback.
  """

  codec: Any = None
  mix2: Any = "global"
  mixers: ClassVar[tuple[str, ...]] = ("mix2",)
  outer_steps: ClassVar[bool] = False

  def __post_init__(self):
    make_codec(self.codec)  # a bad one is refused here, not in the first round

  def inner_grad(self, g: Any, ctx: Context) -> Any:  # type: ignore[override]
    return self.mix2(ctx.weigh(g), ctx)

  def land(self, z, w, x, ms, ctx):
    return w, ms
