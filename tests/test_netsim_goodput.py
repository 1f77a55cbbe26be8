"""Goodput of chips that fail: the published table (methods-core.md 8.6, arXiv 2604.21428), renewal arguments, barriers."""

import math

import numpy as np
import pytest

from fgd_jax.netsim import published
from fgd_jax.netsim.goodput import ChipFailures, _stalls, _with_barriers, closed_form, simulate_goodput


def test_goodput_table(printed):
  """Goodput of Decoupled DiLoCo's simulator: the mean of ten simulated weeks of each cell within 2 points."""
  wanted = {"data_parallel, rigid": (72, 57, 27), "data_parallel, elastic": (88, 80, 58), "2 learners": (94, 88, 70),
            "4 learners": (96, 93, 82), "8 learners": (98, 96, 88), "16 learners": (99, 98, 93)}
  cells = printed("table", "goodput")["cells"]
  got = {row: [c["simulated"] for c in cells if c["row"] == row] for row in wanted}
  for row, values in wanted.items():
    assert got[row] == pytest.approx(values, abs=2), row
  assert max(c["standard_error"] for c in cells) < 0.5


def test_formulas_and_published_table():
  """With the fitted times: within 1.5 points in rigid cells and 1.0 in elastic ones, as docs/netsim.md says."""
  for learners, elastic, row in published.GOODPUT.values():
    for chips, cell in zip(published.CHIPS, row):
      goodput = 100 * closed_form(chips // learners, ChipFailures(), elastic)
      assert goodput == pytest.approx(cell, abs=1.01 if elastic else 1.5)


def test_goodput_closed_forms():
  """Rigid: up 1/F, down r, in turn. No failures: all of the time."""
  model = ChipFailures(restart=76)
  rate = 300_000 / (365.25 * 86400)
  assert simulate_goodput(1, 300_000, model, elastic=False).goodput == pytest.approx(1 / (1 + rate * 76), abs=0.01)
  assert simulate_goodput(1, 300_000, ChipFailures(mean_time=1e15)).goodput == pytest.approx(1)
  for learners in (1, 8):
    result = simulate_goodput(learners, 1_200_000)
    assert result.goodput == pytest.approx(result.closed_form, abs=0.02)
  one, same, other = (simulate_goodput(8, 1_200_000, seed=seed) for seed in (1, 1, 2))
  assert one == same and one.learner_goodput != other.learner_goodput
  assert np.isnan(simulate_goodput(2, 10_000, ChipFailures(shape=0.7)).closed_form)  # no renewal rate at the start


def test_stalls_by_hand():
  """Down 13 s at 100 and 300 s; slices are back at 150 and 160 s and taken in together 100 s after the first, for 20 s."""
  model, back = ChipFailures(), np.array([150.0, 160.0, 900.0])
  failures = np.array([100.0, 105.0, 300.0])
  assert _stalls(model, failures, back, True, 1100.0) == [(100, 113), (250, 270), (300, 313), (1000, 1020)]
  assert _stalls(model, failures, back, True, 990.0) == [(100, 113), (250, 270), (300, 313)]  # the last is after the end
  assert _stalls(model, failures, np.array([150.0, 240.0, 900.0]), True, 260.0)[1:] == [(250, 270)]
  assert _stalls(model, np.array([100.0, 260.0]), np.array([150.0, 900.0]), True, 800.0) == [(100, 113), (250, 270)]
  assert _stalls(model, failures, back, False, 1100.0) == [(100, 176), (300, 376)]


def test_stalls_are_counted_in_the_simulated_time_alone():
  """One rigid learner and a stall longer than the run: at most one."""
  for seed in range(5):
    result = simulate_goodput(1, 100_000, ChipFailures(restart=1e6), elastic=False, seconds=5000.0, seed=seed)
    assert result.stalls == min(result.failures, 1)
  elastic = simulate_goodput(1, 100_000, ChipFailures(away=3e4), seconds=5000.0)
  assert elastic.stalls <= elastic.failures  # hardly a slice is back before the end


def test_slices_are_away_for_the_mean_time():
  """Exponentiated Weibull (1 - exp(-(x/s)^1.5))^2, scaled to its mean."""
  drawn = ChipFailures(away=600.0).absences(np.random.default_rng(0), 400_000)
  assert drawn.mean() == pytest.approx(600, rel=0.005)
  scale = 600 / (1.5**-1 * math.gamma(1 / 1.5) * (2 - 0.5 ** (1 / 1.5)))
  assert np.mean(drawn < 500) == pytest.approx((1 - np.exp(-((500 / scale) ** 1.5))) ** 2, abs=0.004)


def test_barriers_cost_goodput():
  """One learner waits for nobody; of two with stalls at different times, both lose what either loses."""
  one, barred = (simulate_goodput(1, 300_000, barrier=b).goodput for b in (0.0, 300.0))
  assert barred == pytest.approx(one, rel=1e-9)
  free, short, long = (simulate_goodput(8, 1_200_000, barrier=b).goodput for b in (0.0, 100.0, 3600.0))
  assert short < long < free
  stalls = [np.array([[10.0, 15.0]]), np.array([[40.0, 42.0], [70.0, 71.0]])]
  assert _with_barriers(stalls, 100.0, 20.0) == pytest.approx(100 - 5 - 2 - 1)
  assert _with_barriers([s[:1] for s in stalls], 100.0, 100.0) == pytest.approx(95)  # one round: the slower one


def test_goodput_rule_of_thumb_uptime_and_scale(printed):
  """M learners on N chips are as good as one on N/M (8.6); uptime about 100 % for M >= 4; 2.4M chips are cheap."""
  import time
  one, eight = (printed("goodput", f"--learners={m}", f"--chips={150_000 * m}") for m in (1, 8))
  assert eight["goodput"] == pytest.approx(one["goodput"], abs=0.01)
  assert printed("goodput", "--learners=4", "--chips=1200000")["uptime"] > 0.99
  began = time.monotonic()
  got = printed("goodput", "--learners=8", "--chips=2400000", "--shape=0.7")
  assert time.monotonic() - began < 30 and 0 < got["goodput"] < 1
