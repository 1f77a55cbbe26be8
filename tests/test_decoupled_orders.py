"""Orders of events that once broke Decoupled DiLoCo: resumes, re-seeds, rejoins and checkpoints around a killed process."""

import queue
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from decoupled_helpers import Cluster, batch, contribution, options
from test_decoupled_once import Ledger

from fgd_jax.decoupled.healing import Inbox
from fgd_jax.decoupled.learner import Arrived, LearnerCore, Opened, Reseed
from fgd_jax.decoupled.merging import Merger
from fgd_jax.decoupled.replay import Replay
from fgd_jax.decoupled.resuming import settle, still_holds

TOPK = {"codec": "topk", "error_feedback": True}
SMALL = dict(quorum=1, inner_steps=2, fragments=1, overlap=2)


def replayed(cluster, lines, merger=None):
  batches = lambda learner: type("Batches", (), {"__getitem__": lambda self, n: batch(learner, n)})()
  return Replay(cluster.programs, merger or cluster.merger, cluster.params, batches, lines).play()


# --- replay ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_with_error_feedback_is_replayed(x64):
  """One contribution is merged before the cut and applied after it, the learner's second one."""
  cluster = Cluster(options(learners=1, **SMALL, **TOPK))
  cluster.run(6.5)
  core, syncer = cluster.learners[0], cluster.syncers[0]
  lines = list(cluster.records)
  while not core.offers():  # one that is under way at the cut
    cluster.deliver(0)
    core.step(batch(0, core.n))
  saved = core.snapshot(5)
  saved["facts"]["merged"] = [syncer.members[0].taped]
  lines.append({"learner": 0, **{k: saved["facts"][k] for k in ("life", "ops_from", "ops")}})
  life, n = syncer.join(0, {}, cluster.now)
  cluster.learners[0] = LearnerCore(cluster.programs, 0, life, n, cluster.everything(), saved)
  cluster.records.clear()
  cluster.run(6)
  done = replayed(cluster, lines + cluster.records)
  assert len(done) > 4 and all(same for _, same in done), done


def test_merges_that_scale_with_the_learners_are_replayed_after_a_resume_with_others(x64):
  o = options(learners=2, merge="task_arithmetic", **SMALL)
  cluster = Cluster(o)
  cluster.run(6.5)
  later = Merger(options(learners=3, merge="task_arithmetic", shards=2, **SMALL), jax.eval_shape(lambda: cluster.params), 0)
  done = replayed(cluster, cluster.records, later)
  assert len(done) > 1 and all(same for _, same in done), done


# --- re-seeds -------------------------------------------------------------------------------------------------------


def test_a_re_seeded_learner_does_not_contribute_to_a_step_that_its_seed_contains(x64):
  cluster = Cluster(options(**SMALL, **TOPK))
  learner, syncer = cluster.learners[0], cluster.syncers[0]
  learner.receive(Opened(0, 0, 1, True, 2))  # step 1 is called: its grace window runs
  learner.sick = True
  payload = learner.programs.delta(0, learner.w, learner.anchors[0], learner.errors[0], np.int32(1), np.int32(1))[0]
  assert syncer.offer(contribution(cluster, 1, payload=jax.device_get(payload)), 1.0) == "taken"
  cluster.settle()
  assert syncer.version[0] == 1
  learner.receive(Reseed(cluster.everything()))
  learner.step(batch(0, 0))
  assert not learner.offers()  # nobody would ever answer it
  cluster.deliver(0)
  learner.step(batch(0, 1))
  assert [c.t for c in learner.offers()] == [2]


def test_newer_fragments_of_a_syncer_that_has_given_its_part_belong_to_the_re_seed():
  inbox, core = Inbox(2), SimpleNamespace(sick=True)
  mine, late = Opened(0, 0, 5, False, 2), Opened(1, 0, 4, False, 2)
  assert inbox.wants(0, core) and inbox.wants(1, core)
  inbox.heal(0, {0: (1, "old")})
  assert not inbox.wants(0, core) and inbox.wants(1, core)
  inbox.put(0, [Arrived(0, 3, "new", 7), mine])
  inbox.mark("cut")
  inbox.heal(1, {1: (2, "other")})
  assert inbox.healing and not inbox.wants(0, core)
  inbox.put(1, [late])
  assert inbox.get(False, 0) == ["cut"]
  assert inbox.get(False, 0) == [Reseed({0: (3, "new"), 1: (2, "other")}), mine]
  assert inbox.get(False, 0) == [late]
  with pytest.raises(queue.Empty):
    inbox.get(False, 0)


# --- lives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [False, True])
def test_a_life_that_began_since_the_last_step_is_known_to_the_next_syncer(x64, tmp_path, merged):
  ledger = Ledger(tmp_path)
  if merged:
    ledger.hear()
    ledger.train()
    assert ledger.send(ledger.make()[0]) == "taken"
    ledger.merge()
  for life in (2, 3):  # the learner is killed, and then the syncer, before its next merge
    assert ledger.syncer.join(0, {}, 1.0) == (life, 2 * merged)
    for event in ledger.syncer.events:
      ledger.store.append(event)
    ledger.kill_syncer()
  member = ledger.syncer.facts()["members"]["0"]
  assert (member["life"], member["taped"], member["n"]) == (3, 0, 2 * merged)


def test_lives_that_a_checkpoint_knows_are_not_counted_again(x64):
  first, second = Cluster(options(learners=2, quorum=1, inner_steps=4, fragments=4, syncers=2)).syncers
  second.join(0, {}, 1.0, 5)  # the one syncer's part was taken before a learner joined again, the other's after it
  life, _ = first.join(0, {}, 2.0, least=6)
  assert (life, second.join(0, {}, 2.0, life)[0]) == (6, 6)
  assert first.join(0, {}, 3.0, least=6)[0] == 7  # the process was started again


def part(**members):
  return {"facts": {"members": {m[1:]: dict(zip(("life", "taped"), x)) for m, x in members.items()}}}


def test_what_was_merged_of_another_life_settles_nothing():
  states = {m: {"facts": {"life": life}} for m, life in ((0, 2), (1, 2), (2, 1), (3, 1))}
  states[3]["facts"]["merged"] = [9]  # continued by nobody since an earlier resume
  settle(states, [part(m0=(2, 8), m1=(1, 8), m3=(4, 1))])
  assert [states[m]["facts"]["merged"] for m in range(4)] == [[8], [0], [0], [9]]


def test_an_earlier_state_belongs_to_a_checkpoint_while_nothing_was_merged_since():
  ended = 3
  assert still_holds(0, ended, [part(m0=(3, 20)), part(m0=(4, 0))])  # not back at one syncer, no merge at the other
  assert not still_holds(0, ended, [part(m0=(4, 0)), part(m0=(4, 1))])
  assert not still_holds(0, ended, [part(m0=(5, 0))])  # the life between may have contributed


def test_only_the_first_life_of_a_process_continues_a_checkpoint(monkeypatch):
  actors = pytest.importorskip("fgd_jax.decoupled.actors", reason="needs ray")
  monkeypatch.setattr(actors, "CALL_SECONDS", 0.01)
  monkeypatch.setattr(actors, "POLL_SECONDS", 0.01)
  learner = object.__new__(actors.Learner)
  learner.core, learner.resumes, learner.given = None, 4, queue.Queue(1)
  assert learner._given(4) is None  # it did not arrive
  learner.given.put("state")
  assert learner._given(5) == "state"  # the answer to the first attempt to join was lost
  learner.given.put("state")
  learner.core = "trains"
  assert learner._given(6) is None


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Answer:
  """A method of an actor whose answers are these, the last one again and again."""

  def __init__(self, *answers):
    self.answers = list(answers)

  def remote(self, *args):
    return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def saving(monkeypatch):
  """A run of two learners that were resumed at life 4, the second of which gives no state; what it saved is in `saved`."""
  run = pytest.importorskip("fgd_jax.decoupled.run", reason="needs ray")
  made = object.__new__(run.Run)
  monkeypatch.setattr(run.ray, "get", lambda x, timeout=None: x)
  made._closing, made._lives, made.notes, made.saved = False, {0: 3, 1: 3}, [], []
  made._unused = {m: {"facts": {"learner": m, "life": 3, "merged": [7]}} for m in (0, 1)}
  new = {"facts": {"learner": 0, "life": 4, "ops": []}}
  made._watched_learners = [SimpleNamespace(
      name=f"learner {m}", last={"started": True, "learner": m}, handle=SimpleNamespace(snapshot=Answer(state)))
      for m, state in ((0, new), (1, None))]
  made.note = lambda *words: made.notes.append(words)
  made.cuts = SimpleNamespace(save=lambda *words: made.saved.append(words))
  made.syncer = lambda taped, epochs=(0,): SimpleNamespace(started=Answer(*epochs), cut=Answer({
      "epoch": 0, "theta": {}, "facts": {**part(m0=(4, 5), m1=(4, taped))["facts"], "version": {"0": 9}}}))
  return run, made


def test_a_state_of_which_more_was_merged_since_is_not_saved_again(saving):
  _, made = saving
  made.syncers = [made.syncer(taped=0)]
  assert made.save() == 9 and made.saved[0][2].keys() == {0, 1} and "nothing was merged since" in made.notes[0][2]
  assert made.saved[0][2][0]["facts"]["merged"] == [5] and made.saved[0][2][1]["facts"]["merged"] == [7]
  made.syncers = [made.syncer(taped=2)]
  assert made.save() == 9 and made.saved[1][2].keys() == {0} and "the global parameters" in made.notes[1][2]


def test_a_checkpoint_is_dropped_when_a_syncer_was_killed_after_its_part(saving):
  run, made = saving
  made.syncers = [made.syncer(taped=0), made.syncer(taped=0, epochs=(1,))]
  with pytest.raises(run.CutLostError):
    made.save()
  assert not made.saved and set(made._unused) == {1}  # more was merged of learner 0


# --- the grace window -----------------------------------------------------------------------------------------------


def test_xi_quorum_counts_from_the_first_contribution_that_is_there(x64):
  cluster = Cluster(options(learners=3, grace=0.9, **{**SMALL, "quorum": 2}))
  syncer = cluster.syncers[0]
  assert syncer.offer(contribution(cluster, 0), 1.0) == "taken"
  syncer.join(0, {}, 2.0)  # it was killed; its contribution is gone
  syncer.due(2.0)
  for m, now in ((1, 100.0), (2, 101.0)):
    assert syncer.offer(contribution(cluster, m), now) == "taken"
  assert syncer.grace.quorum == 1.0 and syncer.close(150.0).quorum_seconds == 1.0
