"""The statistics of benchmarks/claims_*.py: closed forms, series made by hand, and that no run is trained twice."""

import csv
import json
import os
import sys

import numpy as np
import pytest

BENCHMARKS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "benchmarks")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
  monkeypatch.syspath_prepend(BENCHMARKS)
  yield
  for name in [n for n in sys.modules if n.startswith(("claims", "trials"))]:
    del sys.modules[name]


def test_interval_is_students():
  import trials

  assert trials.interval([1.0, 3.0]) == pytest.approx((2.0, 12.7062), rel=1e-5)  # t(0.975, 1) s / sqrt(2)
  mean, half = trials.interval([0.0, 1.0, 2.0, 3.0, 4.0])
  assert (mean, half) == pytest.approx((2.0, 2.77645 * np.sqrt(2.5 / 5)), rel=1e-5)  # t(0.975, 4 degrees)


def test_best_setting_is_the_least_mean_and_diverged_runs_come_last():
  import trials

  done = {("a", 1): 1.0, ("a", 2): 3.0, ("b", 1): 1.5, ("b", 2): 1.5, ("c", 1): float("nan"), ("c", 2): 0.0}
  done = {key: {"eval_loss": loss} for key, loss in done.items()}
  assert trials.best(done, ["c", "a", "b"], [1, 2]) == "b"
  assert trials.best(done, ["c", "b", "a"], [1]) == "a"


def test_runs_that_are_there_are_not_trained_again(tmp_path, monkeypatch):
  import trials

  path, trained = tmp_path / "runs.jsonl", []
  path.write_text(json.dumps({"words": "a", "seed": 1, "eval_loss": 1.0}) + '\n{"words": "a", "seed": 2, "ev')

  def child(words, seeds):
    trained.append((words, seeds))
    yield from (json.dumps({"words": words, "seed": s, "eval_loss": 0.5}) + "\n" for s in seeds)

  monkeypatch.setattr(trials, "_child", child)
  done = trials.runs(str(path), [("a", [1, 2, 3]), ("a", [2]), ("b", [1])])
  assert sorted(trained) == [("a", [2, 3]), ("b", [1])]
  assert {key: row["eval_loss"] for key, row in done.items()} == {("a", 1): 1.0, ("a", 2): 0.5, ("a", 3): 0.5, ("b", 1): 0.5}
  assert trials.runs(str(path), [("a", [3])]) == done and len(trained) == 2


def test_a_training_is_a_row(monkeypatch):
  import trials

  words = ("workers=2,inner_steps=2,rounds=3,batch_size=1,seq_len=8,model.dim=16,model.layers=1,model.ffn_dim=16,"
           "eval_batches=1,eval_batch_size=2,measure_sequences=1,eval_every=2,measure_every=0,data.max_bytes=200000,method=diloco")
  (row,) = trials.trained(words, [5])
  assert [point["round"] for point in row["curve"]] == [2, 3] and row["tokens"] == 3 * 2 * 2 * 8
  assert row["eval_loss"] == row["curve"][-1]["eval_loss"] == pytest.approx(row["eval_loss_workers"], abs=1e-5)
  assert "js_distance" not in row  # nothing was measured


def test_settings_keep_the_tokens():
  import claims
  import trials

  for workers, inner_steps in ((4, 20), (16, 20), (8, 10), (8, 50), (8, 100)):
    c = trials.config_of(claims.settings(workers, inner_steps))
    assert c.rounds * c.workers * c.inner_steps * c.batch_size * c.seq_len == claims.TOKENS
  with pytest.raises(ValueError, match="does not divide"):
    claims.settings(inner_steps=30)


def test_the_bandwidth_gives_diloco_its_utilisation():
  import claims

  words = claims.METHODS["DiLoCo"].words(claims.settings(), "")
  bandwidth = claims.like_100_mbps(words)
  assert claims.seconds(words, f"{bandwidth}Mbps")[1] == pytest.approx(0.36, abs=1e-3)
  # A ring sends 2 (M-1)/M of 455,520 float32 parameters; H = 20 steps of a second are 36 % of a round.
  assert bandwidth == pytest.approx(2 * 7 / 8 * 455_520 * 32 / 1e6 / (20 * 0.64 / 0.36), rel=1e-2)


def test_verdicts():
  from claims_pipelined import verdict

  assert [verdict(*x) for x in ((-0.01, 0.005), (0.002, 0.005), (0.03, 0.01), (0.005, 0.02))] == [
      "better", "as good", "behind", "not resolved"]


def test_spikes_warnings_and_leads_by_hand():
  import claims_spikes as c

  loss = np.array([3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.5, 2.6, 2.7, 2.4, 2.3, 2.3, 2.35])
  assert c.spikes(loss) == [7, 12]  # 2.6 > 2.5 + 0.03, and 2.35 > 2.3 + 0.03; round 8 goes on with the first one
  distance = np.ones(13)
  distance[[5, 11]] = 2.0
  np.testing.assert_allclose(c.raised(distance)[[5, 6, 11, 12]], [np.log(2), 0, np.log(2), 0])
  assert np.all(np.isnan(c.raised(distance)[:5]))
  assert c.lead({"loss": loss, "js": distance}, "js") == [2, 1]
  assert c.auc(np.array([3.0, 1.0, 2.0, 1.0]), np.array([True, True, False, False])) == (1 + 1 + 0 + 0.5) / 4
  curve = {"loss": loss, "js": distance}
  assert c.by_chance([curve], "js") == 2 / 3  # of rounds 10, 11, 12: round 5 stands before the first, 11 before the last
  distance[7], distance[12] = 3.0, 0.5
  assert c.at_spikes([curve], "js") == pytest.approx(np.sqrt(3 * 0.5))  # over medians of 1


def test_tracking_finds_its_round():
  import claims_spikes as c

  rng = np.random.default_rng(0)
  loss = 3 + rng.normal(size=300)
  above = np.array([loss[r] - np.median(loss[r - c.BACK:r]) for r in range(c.BACK, 300)])
  distance = np.ones(300)  # log(distance / median of the rounds before) = `above`, by construction
  for r in range(c.BACK, 300):
    distance[r] = np.exp(above[r - c.BACK]) * np.median(distance[r - c.BACK:r])
  assert c.tracks([{"js": distance, "loss": loss}], "js") == pytest.approx(1)
  assert abs(c.tracks([{"js": np.roll(distance, 7), "loss": loss}], "js")) < 0.3
  two_later = {"js": distance[2:], "loss": loss[:-2]}  # the distance moves two rounds before the loss
  assert c.tracks([two_later], "js", 2) > 0.98 and abs(c.tracks([two_later], "js")) < 0.3


def test_equal_hours_by_hand(tmp_path, monkeypatch):
  """Utilisation 0.36: a round of H = 20 takes DiLoCo 20 + 35.6 s, GlobalM1 35.6 s; pairs send 1/1.75 of a ring's bytes."""
  import argparse

  import claims
  import claims_order as c

  setting = dict.fromkeys(c.METHODS, "")
  words = {name: entry.words(claims.settings(), "") for name, entry in c.METHODS.items()}
  falling = {"eval_loss": 2.0, "curve": [{"round": 0, "eval_loss": 4.0}, {"round": 20, "eval_loss": 2.0}]}
  done = {(w, s): falling for w in words.values() for s in (1, 2)}
  monkeypatch.setattr(c.trials, "runs", lambda path, wanted, *_: {(w, s): {"eval_loss": 2.5} for w, seeds in wanted
                                                                 for s in seeds} | done)
  args = argparse.Namespace(final=[1, 2], out=str(tmp_path), jobs=1)
  c.equal_hours(args, setting, words, done)
  with open(tmp_path / "order_hours.csv", newline="") as f:
    rows = {row["method"]: row for row in csv.DictReader(f)}
  ring = 20 / 0.36 - 20
  for name, seconds in (("GlobalM1", ring), ("LocalM1M2", 2 * ring / 1.75), ("GlobalM1LocalM2", ring + ring / 1.75)):
    rounds = 20 * seconds / (20 / 0.36)
    row = {k: float(v) for k, v in rows[name].items() if k != "method"}
    assert row["hours"] == pytest.approx(20 * seconds / 3600, rel=1e-3) and row["diloco_rounds"] == round(rounds)
    assert row["minus_diloco_ended"] == pytest.approx(2.0 - (2.0 if round(rounds) == 20 else 2.5))
    assert row["minus_diloco_long"] == pytest.approx(2.0 - max(4.0 - 0.1 * rounds, 2.0), abs=1e-2)


@pytest.mark.parametrize("method, factor", [
    ("DiLoCo", 1), ("GlobalM1", 2), ("GlobalM1LocalM2", 1 + 3 / 7), ("LocalM1M2", 1.75), ("LocalM1", 2.75)])
def test_the_bound_is_met_without_curvature(method, factor):
  from claims_bound import Case, train

  row = train(Case("quadratic", method, 1.0, 0.0, rounds=30))
  assert row[9] == pytest.approx(factor) and row[10] == pytest.approx(1, abs=0.06)
