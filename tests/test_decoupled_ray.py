"""Decoupled DiLoCo on real Ray processes: failures, exactness, interruption, resume, replay. Tiny models, paced learners."""

import glob
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fgd_jax import train as trainer
from fgd_jax.decoupled.options import check
from fgd_jax.default_config import get_config

run = pytest.importorskip("fgd_jax.decoupled.run", reason="needs ray")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ("batch_size=2,seq_len=16,eval_batches=2,eval_batch_size=4,measure_every=0,inner.warmup_steps=2,model.dim=16,"
        "model.ffn_dim=24,model.layers=1,model.heads=2,model.kv_heads=1,data.source=synthetic,inner.schedule=constant")


def lines(path):
  with open(path) as f:
    return [json.loads(line) for line in f]


# --- failures -------------------------------------------------------------------------------------------------------

PACE, WATCH = 0.4, 8.0
# Of the rate of the run's first, undisturbed window: other processes share the cores, and do so unevenly. A learner that
# waits for another one loses far more: `silent_after` is 3 of the 8 seconds, a pause or a new start all of them.
SLACK = 0.25


LIVE = (f"{TINY},quorum=1,steps=100000,inner_steps=4,decoupled.fragments=2,eval_every=0,checkpoint_every=0,"
        f"decoupled.pace={PACE},decoupled.silent_after=3,decoupled.codec=int8,decoupled.error_feedback=True")


class Live:
  """A run that goes on, with what the tests ask of it."""

  def __init__(self, workdir, options="learners=4"):
    self.workdir = workdir
    config = get_config(f"{LIVE},{options}")
    check(config)
    self.run = run.Run(config, workdir)
    self.until(lambda: all(s["started"] and s["n"] > 4 for s in self.statuses()), 300)

  def until(self, done, seconds):
    end = time.monotonic() + seconds
    while not done():
      assert time.monotonic() < end, f"not within {seconds} s: {self.events()[-4:]}"
      self.run.tick()
      time.sleep(0.1)

  def watch(self, seconds):
    end = time.monotonic() + seconds
    self.until(lambda: time.monotonic() > end, seconds + 5)

  def statuses(self):
    return [s or {"started": False} for s in self.run.statuses()]

  def status(self, m):
    return run.ray.get(self.run.learners[m].status.remote(), timeout=30)

  def pid(self, m):
    return self.status(m)["pid"]

  def events(self, actor=None):
    found = lines(os.path.join(self.workdir, "events.jsonl"))
    return [(e["actor"], e["event"]) for e in found if actor in (None, e["actor"])]

  def rates(self, learners, during):
    """Inner steps a second of these learners, times the pace, while `during` runs."""
    before = {m: (self.status(m)["n"], time.monotonic()) for m in learners}
    during()
    out = {}
    for m, (n, t) in before.items():
      out[m] = (self.status(m)["n"] - n) / (time.monotonic() - t) * PACE
    return out

  def undisturbed(self, learners, during):
    """Their step rate is that of the first window, less SLACK and the step by which each count of steps is uncertain."""
    rates = self.rates(learners, during)
    slack = SLACK + 2 * PACE / WATCH
    assert all(rate > (1 - slack) * self.first[m] for m, rate in rates.items()), (rates, self.first)

  def contributors(self, since, syncer=0):
    return {c["learner"] for record in self.tape(syncer) if record["step"] > since for c in record["contributions"]}

  def tape(self, syncer=0):
    return [x for x in lines(os.path.join(self.workdir, "syncer", str(syncer), "tape.jsonl")) if "step" in x]

  def steps(self):
    return [r["round"] for r in lines(os.path.join(self.workdir, "metrics.jsonl"))]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
  workdir = str(tmp_path_factory.mktemp("failures") / "run")
  with trainer.claimed(workdir):
    made = Live(workdir)
    made.first = made.rates(range(4), lambda: made.watch(WATCH))
    yield made
    made.run.close()


def test_a_paused_learner_disturbs_nobody_and_comes_back(live):
  # The pace is what limits an undisturbed learner, so that the first window is a measure: not much less, and never more.
  assert all(0.5 < rate < 1 + SLACK for rate in live.first.values()), live.first
  pid, step = live.pid(1), live.run.step
  os.kill(pid, signal.SIGSTOP)
  try:
    live.undisturbed([0, 2, 3], lambda: live.watch(WATCH))
    live.until(lambda: ("learner 1", "silent") in live.events() and live.run.step > step + 5, 60)
  finally:
    os.kill(pid, signal.SIGCONT)
  live.until(lambda: live.events("learner 1")[-1] == ("learner 1", "back"), 60)
  step = live.run.step
  live.until(lambda: 1 in live.contributors(step), 60)


def test_a_slow_learner_disturbs_nobody_and_still_contributes(live):
  run.ray.get(live.run.learners[3].set_pace.remote(5 * PACE))
  step = live.run.step
  live.undisturbed([0, 1, 2], lambda: live.watch(WATCH))
  live.until(lambda: 3 in live.contributors(step), 60)
  run.ray.get(live.run.learners[3].set_pace.remote(PACE))


def test_a_learner_with_nan_is_reported_and_seeded_again(live):
  run.ray.get(live.run.learners[2].poison.remote())
  live.until(lambda: ("learner 2", "reseeded") in live.events(), 60)
  assert live.events("learner 2")[-2:] == [("learner 2", "non_finite"), ("learner 2", "reseeded")]
  step = live.run.step
  live.until(lambda: 2 in live.contributors(step), 60)


def test_a_killed_learner_disturbs_nobody_and_is_started_again_while_another_joins(live):
  step = live.run.step
  os.kill(live.pid(2), signal.SIGKILL)
  live.undisturbed([0, 1, 3], lambda: live.watch(WATCH))
  live.until(lambda: ("learner 2", "died") in live.events() and live.run.step > step + 5, 60)
  live.run.add_learner()
  since = lambda actor, event: live.events(actor)[live.events(actor).index((actor, event)):]
  live.until(lambda: ("learner 2", "trains") in since("learner 2", "died") and ("learner 4", "trains") in live.events(), 240)
  step = live.run.step
  live.until(lambda: {2, 4} <= live.contributors(step), 60)
  assert ("learner 2", "rejoined") in live.events() and ("learner 4", "joined") in live.events()


def test_a_killed_syncer_loses_nothing_and_learners_train_on(live):
  lives, step = {m: live.status(m)["life"] for m in range(5)}, live.run.step
  pid = live.run._watched_syncers[0].last["pid"]
  os.kill(pid, signal.SIGKILL)
  live.undisturbed([0, 1, 3], lambda: live.watch(WATCH))
  live.until(lambda: ("syncer 0", "restarted") in live.events(), 240)
  step = live.run.step
  live.until(lambda: live.run.step > step + 4 and live.contributors(step) == set(range(5)), 120)
  assert {m: live.status(m)["life"] for m in range(5)} == lives
  assert live.steps() == list(range(1, len(live.steps()) + 1))


# --- two syncers, joined learners -----------------------------------------------------------------------------------

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
  step = two.run.step
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


def test_a_joined_learner_is_started_again_and_continued_from_checkpoints(two):
  address = run.ray.get_runtime_context().gcs_address
  process = start("fgd_jax.decoupled", f"{LIVE},learners=2,{TWO}", two.workdir, f"--ray-address={address}", "--join=1")
  two.until(lambda: process.poll() is not None, 240)
  code, _, err = finish(process)
  assert code == 0 and "Learner 2 trains" in err and "Traceback" not in err, err
  os.kill(two.pid(2), signal.SIGKILL)
  two.until(lambda: ("learner 2", "restarted") in two.events() and two.events("learner 2")[-1][1] == "trains", 240)
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


# --- the command ----------------------------------------------------------------------------------------------------

EXACT = f"{TINY},learners=2,quorum=2,steps=6,inner_steps=3,decoupled.overlap=0,decoupled.merge=mean," \
    "decoupled.fragments=1,eval_every=1,checkpoint_every=0,model.dtype=float64,model.param_dtype=float64,decoupled.pace=0.2"


def environment(x64="1"):
  """As a user's shell has it: without the test suite's eight devices."""
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": x64}


def command(module, arg, workdir, *options):
  return [sys.executable, "-m", module, f"--config=configs/default.py:{arg}", f"--workdir={workdir}", *options]


def start(*words, x64="1"):
  return subprocess.Popen(command(*words), cwd=ROOT, env=environment(x64), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)


def finish(process, seconds=400):
  out, err = process.communicate(timeout=seconds)
  return process.returncode, out, err


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
  """The folder of a run that SIGTERM has stopped after some steps."""
  workdir = str(tmp_path_factory.mktemp("command") / "run")
  process = start("fgd_jax.decoupled", EXACT, workdir)
  path = os.path.join(workdir, "metrics.jsonl")
  end = time.monotonic() + 300
  while not (os.path.exists(path) and len(lines(path)) >= 2):
    assert process.poll() is None and time.monotonic() < end, finish(process)[2]
    time.sleep(0.1)
  process.send_signal(signal.SIGTERM)  # as a preempted job gets it; Ctrl-C is the same
  code, _, err = finish(process)
  assert code == 130 and "the same command continues" in err and "Traceback" not in err, err
  assert glob.glob(os.path.join(workdir, "checkpoints", "*"))
  return workdir


def test_an_interrupted_run_is_resumed_and_equals_train(x64, interrupted, tmp_path):
  path = os.path.join(interrupted, "metrics.jsonl")
  process = start("fgd_jax.decoupled", EXACT, interrupted, "--json")
  trainer.train(get_config(f"{EXACT},workers=2,rounds=6,method=diloco"), str(tmp_path / "train"))
  want = [r["eval_loss"] for r in lines(tmp_path / "train" / "metrics.jsonl")]
  code, out, err = finish(process)
  assert code == 0 and "Resuming at step" in err and json.loads(out)["steps"] == 6, err
  assert [r["round"] for r in lines(path)] == list(range(1, 7))
  got = lines(path)[-1]["eval_loss"]
  assert got == pytest.approx(want[-1], abs=1e-10) and abs(want[-1] - want[0]) > 1e-3
  with pytest.raises(ValueError, match="inner.lr=0.1 contradicts the run"):
    run.recognise(get_config(f"{EXACT},inner.lr=0.1"), interrupted)


def test_a_run_is_resumed_with_more_learners_and_replayed_bit_for_bit(interrupted):
  longer = (EXACT, interrupted, "--config.steps=9", "--config.learners=3", "--config.quorum=3", "--json")
  code, out, err = finish(start("fgd_jax.decoupled", *longer))
  assert code == 0 and json.loads(out)["steps"] == 9 and "learner 2: joined" in err, err
  code, out, err = finish(start("fgd_jax.decoupled", *longer, "--replay"))
  assert code == 0 and json.loads(out) == {"steps": 9, "equal": 9, "first_difference": None}, err


def test_bad_starts_end_in_a_sentence(tmp_path):
  options = {"quorum": "--config.quorum=9", "address": "--ray-address=127.0.0.1:1", "replay": "--replay"}
  arg = f"{TINY},inner_steps=4"
  processes = {name: start("fgd_jax.decoupled", arg, str(tmp_path / name), option) for name, option in options.items()}
  words = {"quorum": "quorum=9 exceeds learners=4", "address": "nothing answers there", "replay": "holds no run to replay"}
  for name, process in processes.items():
    code, _, err = finish(process)
    assert code == 2 and words[name] in err and "Traceback" not in err, err


def test_without_ray_the_extra_is_named(tmp_path):
  hide = tmp_path / "ray"
  hide.mkdir()
  (hide / "__init__.py").write_text("raise ImportError('hidden')")
  env = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
  out = subprocess.run(command("fgd_jax.decoupled", TINY, str(tmp_path / "run")), cwd=ROOT, env=env, capture_output=True,
                       text=True, timeout=300)
  assert out.returncode == 2 and "pip install 'fgd-jax[decoupled]'" in out.stderr and "Traceback" not in out.stderr
