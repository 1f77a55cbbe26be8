"""Quarantine: a worker whose loss, parameters or optimizer states turn non-finite is left out and restored.

Every worker looks at itself, and its own message tells the others (`fgd_jax.mixing.Mixer`), so that nothing more crosses
workers. A sick worker's steps of the round are thrown away: it goes on from where they started, as far as its exchanges take
it, with the inner optimizer's numbers as at the start and its counts (of schedules) as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fgd_jax.mixing import exchange
from fgd_jax.mixing.stacks import finite_rows, rows, where_rows
from fgd_jax.workers import Workers

PyTree = Any

# What `metrics["quarantine"]` says of a worker and round: its index here, 0 where it is healthy.
CAUSES = ("", "loss", "parameters or inner optimizer state", "outer step")


class NonFiniteError(RuntimeError):
  """A loss or a state is no longer finite, and the run cannot go on."""


def examine(start: PyTree, w: PyTree, opt: PyTree, loss_KxS: jax.Array, fresh: Callable[[PyTree], PyTree],
            averaged: bool = False) -> tuple[PyTree, PyTree, jax.Array]:
  """Looks at workers after inner steps, and takes the sick ones back.

  Args:
    start, w: parameters [K, ...] before and after the steps; the former are finite.
    opt: the inner optimizer's state after them.
    loss_KxS: of the steps.
    fresh: stack of parameters -> the inner optimizer's state at the start.
    averaged: gradients were averaged over the healthy, so that a loss alone makes nobody sick.

  Returns:
    w, opt, and the cause by worker, int32 [K].
  """
  new = fresh(start)
  usual = jax.tree.map(lambda x, n: jnp.where(x == n, 0, x), opt, new)  # an optimizer may start with an infinity
  lost, broken = ~jnp.isfinite(loss_KxS).all(axis=1), ~finite_rows((w, usual))
  sick = broken if averaged else broken | lost
  cause = jnp.where(lost, 1, jnp.where(broken, 2, 0)).astype(jnp.int32)
  return where_rows(~sick, w, start), renewed(sick, opt, new), cause


def renewed(where: jax.Array, opt: PyTree, fresh: PyTree) -> PyTree:
  """The inner optimizer's states with fresh numbers for some workers (bool [K]); counts stay, and so do schedules."""
  floats = lambda new, old: jnp.issubdtype(old.dtype, jnp.inexact)
  return jax.tree.map(lambda new, old: where_rows(where, new, old) if floats(new, old) else old, fresh, opt)


def landed(new: PyTree, old: PyTree, cause: jax.Array) -> tuple[PyTree, jax.Array]:
  """After the outer step: who has a number that is not finite keeps what it had; returns the trees and the causes."""
  fine = finite_rows(new)
  return where_rows(fine, new, old), jnp.where(fine | (cause > 0), cause, 3)


def rejoin_program(workers: Workers, fresh: Callable[[PyTree], PyTree] | None) -> Callable:
  """(z, inner_opt_state, ms, worker, donor) -> the same with the donor's values for the worker (`Round.rejoin`).

  `fresh` as in `examine`; None: the inner optimizer's numbers are the donor's, too.
  """
  def given(x, ids, worker, donor):
    numbers = x.astype(jnp.int32) if x.dtype == bool else x
    donated = exchange.sum_over_workers(where_rows(ids == donor, numbers, 0), workers.placement)
    return jnp.where(rows(ids == worker, x), donated.astype(x.dtype), x)

  def body(z, opt, ms, ids, worker, donor):
    z, opt, ms = jax.tree.map(lambda x: given(x, ids, worker, donor), (z, opt, ms))
    return z, opt if fresh is None else renewed(ids == worker, opt, fresh(z)), ms

  def run(z, opt, ms, worker, donor):
    ids = jnp.arange(workers.count, dtype=jnp.int32)
    return workers.spmd(body, stacks=4)(z, opt, ms, ids, worker, donor)

  return run
