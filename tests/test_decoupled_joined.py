"""Decoupled DiLoCo on real Ray processes: two syncers, one of which is killed, and learners that join."""

import json
import os
import signal

import pytest

from fgd_jax import train as trainer

run = pytest.importorskip("fgd_jax.decoupled.run", reason="needs ray")
from decoupled_live import LIVE, Live, finish, start  # noqa: E402

TWO = "decoupled.syncers=2,decoupled.pace=0.1"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A run of two learners and two syncers, which a test may end."""
  workdir = str(tmp_path_factory.mktemp("two") / "run")
  with trainer.claimed(workdir):
    made = Live(workdir, f"learners=2,{TWO}")
    yield made
    if run.ray.is_initialized():
      made.run.close()


def test_a_learner_and_one_of_two_syncers_are_killed(two):
  os.kill(two.run._watched_syncers[1].last["pid"], signal.SIGKILL)
  two.until(lambda: ("syncer 1", "died") in two.events(), 240)
  os.kill(two.pid(0), signal.SIGKILL)  # it joins syncer 0 before syncer 1 is back
  two.until(lambda: ("syncer 1", "restarted") in two.events() and ("learner 0", "restarted") in two.events(), 240)
  os.kill(two.run._watched_syncers[0].last["pid"], signal.SIGKILL)
  two.until(lambda: ("syncer 0", "restarted") in two.events(), 240)
  step = two.run.step
  two.until(lambda: two.run.step > step + 8 and two.contributors(step) == two.contributors(step, 1) == {0, 1}, 240)
  assert two.steps() == list(range(1, len(two.steps()) + 1))
  assert two.status(0)["life"] == 2 and two.status(1)["life"] == 1


def test_a_learner_that_joined_is_started_again(two):
  address = run.ray.get_runtime_context().gcs_address
  process = start("fgd_jax.decoupled", f"{LIVE},learners=2,{TWO}", two.workdir, f"--ray-address={address}", "--join=1")
  two.until(lambda: process.poll() is not None, 240)
  code, _, err = finish(process)
  assert code == 0 and "Learner 2 trains" in err and "Traceback" not in err, err
  os.kill(two.pid(2), signal.SIGKILL)
  two.until(lambda: ("learner 2", "restarted") in two.events() and two.events("learner 2")[-1][1] == "trains", 240)


def test_a_learner_that_joined_is_continued_from_checkpoints(two):
  saved = two.run.finish()
  before = {m: two.status(m) for m in range(3)}
  two.run.close()
  two.__init__(two.workdir, f"learners=3,{TWO}")
  assert [two.status(m)["life"] for m in range(3)] == [before[m]["life"] + 1 for m in range(3)] and before[2]["life"] == 2
  two.until(lambda: {0, 1, 2} == two.contributors(saved) == two.contributors(saved, 1), 240)
  new = [c for x in two.tape() for c in x["contributions"] if c["life"] > before[c["learner"]]["life"] and not c["ops_from"]]
  starts = {c["learner"]: c["ops"][0] for c in new}
  assert all(op[0] == "join" and op[1] > 0 and op[3] != "fresh" for op in starts.values()) and sorted(starts) == [0, 1, 2]


def test_what_was_killed_joined_and_continued_is_replayed_bit_for_bit(two):
  two.run.close()
  code, out, err = finish(start("fgd_jax.decoupled", f"{LIVE},learners=3,{TWO}", two.workdir, "--replay", "--json", x64="0"))
  steps = [len(two.tape(s)) for s in (0, 1)]
  assert code == 0 and json.loads(out) == {"steps": sum(steps), "equal": sum(steps), "first_difference": None}, err
