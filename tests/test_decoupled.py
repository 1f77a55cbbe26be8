"""Decoupled DiLoCo without Ray: rules of learners and syncer against the spec, and against the SPMD round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoupled_helpers import INNER, Cluster, batch, loss, options, start

import fgd_jax as fgd


def spmd(method, rounds, m, h):
  """Outer parameters after so many rounds of the SPMD path, with the cluster's model and batches."""
  init, round_fn = fgd.build_round(method, loss, INNER, workers=fgd.Workers(m))
  state = init(start())
  for r in range(rounds):
    rows = [[batch(i, r * h + j) for j in range(h)] for i in range(m)]
    batches = {k: np.stack([np.stack([b[k] for b in row]) for row in rows]) for k in ("x", "y")}
    state, _ = round_fn(state, batches)
  return round_fn.eval_params(state)


def difference(a, b):
  return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y))), a, b)))


@pytest.mark.parametrize("merge", ["mean", "rda", "iso_c", "ties"])
def test_equal_learners_with_full_quorum_are_diloco(x64, merge):
  o = options(learners=3, quorum=3, inner_steps=4, fragments=1, merge=merge)
  cluster = Cluster(o)
  cluster.run(3 * 4 + 1.5)
  assert [r["step"] for r in cluster.records] == [1, 2, 3]
  assert all(len(r["contributions"]) == 3 for r in cluster.records)
  want = spmd(fgd.methods.make("diloco", outer_lr=0.7, outer_momentum=0.9, aggregator=merge), 3, 3, 4)
  assert difference(cluster.theta(), want) < 1e-12


@pytest.mark.parametrize("syncers", [1, 3])
@pytest.mark.parametrize("blend", [0.0, 0.25])
def test_equal_learners_with_full_quorum_are_streaming_diloco(x64, blend, syncers):
  o = options(learners=2, quorum=2, inner_steps=6, fragments=3, blend=blend, syncers=syncers)
  cluster = Cluster(o)
  cluster.run(4 * 6 + 1.5)
  method = fgd.methods.make("streaming_diloco", fragments=3, order="balanced", delay=0, blend=blend, outer_lr=0.7,
                            outer_momentum=0.9)
  assert difference(cluster.theta(), spmd(method, 4, 2, 6)) < 1e-12
