"""Decoupled DiLoCo on real Ray processes: failures, exactness, interruption, resume, replay. Tiny models, paced learners."""

import glob
import json
import os
import signal
import subprocess
import time

import pytest

from fgd_jax import train as trainer
from fgd_jax.default_config import get_config

run = pytest.importorskip("fgd_jax.decoupled.run", reason="needs ray")
from decoupled_live import PACE, ROOT, SLACK, TINY, WATCH, Live, command, environment, finish, lines, start  # noqa: E402

# --- failures -------------------------------------------------------------------------------------------------------


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


# --- the command ----------------------------------------------------------------------------------------------------

EXACT = f"{TINY},learners=2,quorum=2,steps=6,inner_steps=3,decoupled.overlap=0,decoupled.merge=mean," \
    "decoupled.fragments=1,eval_every=1,checkpoint_every=0,model.dtype=float64,model.param_dtype=float64,decoupled.pace=0.2"


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
  assert out.returncode == 2 and "pip install '.[decoupled]'" in out.stderr and "Traceback" not in out.stderr
