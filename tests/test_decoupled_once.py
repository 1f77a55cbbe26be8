"""Contributions of Decoupled DiLoCo that come twice, late, or to a syncer that was killed: each counts once or not."""

import jax
import numpy as np
import pytest
from decoupled_helpers import Cluster, batch, contribution, options, zeros

from fgd_jax.decoupled.learner import LearnerCore
from fgd_jax.decoupled.store import Store
from fgd_jax.decoupled.syncer import Contribution, SyncerCore


class Ledger:
  """One learner's contributions of a fragment, and a syncer with a disk that may be killed at any point.

  Attributes:
    left: what the merged contributions left out, sum (delta - decoded payload): by algebra the error feedback.
  """

  def __init__(self, folder):
    self.cluster = Cluster(options(quorum=1, inner_steps=2, fragments=1, overlap=2, codec="topk", error_feedback=True))
    self.learner, self.store = self.cluster.learners[0], Store(str(folder))
    self.left = zeros(self.cluster.merger, 0)
    self.others = 0

  @property
  def syncer(self):
    return self.cluster.syncers[0]

  def make(self):
    """The next contribution, and what it would leave out."""
    made, = self.learner.offers()
    made.payload = jax.device_get(made.payload)
    w = self.cluster.programs.fragments.take(self.learner.w, 0)
    got = self.cluster.merger.decode(0, made.payload)
    return made, {k: np.asarray(x) - np.asarray(w[k]) - got[k] for k, x in self.learner.anchors[0].items()}

  def send(self, made):
    return self.syncer.offer(Contribution(**vars(made)), 1.0)

  def merge(self):
    closed = self.syncer.close(1.0)
    self.store.append(self.syncer.commit(closed, self.syncer.compute(closed), 1.0, 0.0))
    self.store.save(0, self.syncer.theta[0], self.syncer.outer[0], self.syncer.facts())

  def another_merges(self):
    self.others += 1
    programs, learner, number = self.cluster.programs, self.learner, np.int32(1)
    payload, _ = programs.delta(0, learner.w, learner.anchors[0], programs.no_error(0), number, number)
    c = contribution(self.cluster, 1, t=self.syncer.t, seq=self.others, epoch=self.syncer.epoch,
                     payload=jax.device_get(payload))
    assert self.syncer.offer(c, 1.0) == "taken"
    self.merge()

  def kill_syncer(self):
    self.store.append({"event": "started", "syncer_step": self.syncer.t})
    self.cluster.syncers[0] = SyncerCore(self.cluster.options, self.cluster.merger, {}, self.cluster.params)
    self.store.load(self.syncer, 1.0)

  def hear(self):
    assert all(self.syncer.heard(m, 1, 1.0, self.learner.n) for m in (0, 1))
    self.cluster.deliver(0)

  def train(self):
    for _ in range(2):
      self.learner.step(batch(0, self.learner.n))

  def counts(self, without):
    self.left = {k: x + without[k] for k, x in self.left.items()}

  def check(self):
    for k, x in self.left.items():
      np.testing.assert_allclose(self.learner.errors[0][k], x, atol=1e-12)


@pytest.mark.parametrize("fates", [["answer lost"], ["late"], ["syncer killed", "late"], ["syncer killed after the merge"],
                                   ["merged", "syncer killed after the merge", "late", "syncer killed", "answer lost"]])
def test_error_feedback_is_what_merged_contributions_left_out(x64, tmp_path, fates):
  ledger = Ledger(tmp_path)
  for fate in fates:
    ledger.hear()
    ledger.train()
    made, without = ledger.make()
    if fate == "late":
      ledger.another_merges()
      assert ledger.send(made) == "late"
    elif fate == "syncer killed":
      assert ledger.send(made) == "taken"
      ledger.kill_syncer()
      ledger.hear()
      assert ledger.send(made) == "late"  # it was made for the syncer that is dead
      ledger.train()  # what it has learnt meanwhile counts, too
      again, without = ledger.make()
      assert (again.t, again.steps) == (made.t, 4) and ledger.send(made) == "late" and ledger.send(again) == "taken"
      ledger.merge()
    else:
      assert ledger.send(made) == "taken"
      if fate == "answer lost":
        assert ledger.send(made) == "taken"  # again, before the merge
      ledger.merge()
      if fate == "syncer killed after the merge":
        ledger.kill_syncer()
      if fate != "merged":
        assert ledger.send(made) == "late"  # again, after the merge: it is not counted twice
    if fate != "late":
      ledger.counts(without)
    ledger.hear()
    ledger.check()
  assert ledger.syncer.t == len(fates) + 1


@pytest.mark.parametrize("fate", ["merged", "late", "under way"])
def test_a_snapshot_with_a_contribution_in_doubt_is_settled_by_the_syncers_part(x64, tmp_path, fate):
  ledger = Ledger(tmp_path)
  ledger.hear()
  ledger.train()
  made, without = ledger.make()
  saved = ledger.learner.snapshot(1)
  if fate == "late":
    ledger.another_merges()
  if fate == "merged":
    ledger.send(made)
    ledger.merge()
    ledger.counts(without)
  saved["facts"]["merged"] = [ledger.syncer.facts()["members"]["0"]["taped"]]
  ledger.learner = LearnerCore(ledger.cluster.programs, 0, 2, 2, ledger.cluster.everything(), saved)
  ledger.check()
  assert ledger.learner.channels[0].due == (2 if fate == "under way" else 4)
