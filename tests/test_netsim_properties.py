"""Properties of the network simulator for arbitrary methods, links and failures (hypothesis)."""

import numpy as np
import pytest

from fgd_jax import methods, netsim
from fgd_jax.netsim import closed
from fgd_jax.netsim.failures import Drops, Interruptions, StepTimes
from fgd_jax.netsim.goodput import simulate_goodput
from fgd_jax.netsim.layers import Layered
from fgd_jax.netsim.links import KINDS, Links

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

NAMES = sorted([*methods.METHODS, *methods.PRESETS])
quick = settings(max_examples=60, deadline=None, derandomize=True)
names, seeds, rates = st.sampled_from(NAMES), st.integers(0, 10**6), st.floats(1e7, 1e11)


def plan_of(name, workers, kind="ring", params=1e8):
  options = {"fragments": 5} if name in ("streaming_diloco", "pipelined_diloco") else None
  return netsim.make_plan(name, params, 16, workers, 10, kind=kind, options=options)


@quick
@given(name=names, workers=st.integers(1, 9), seed=seeds, kind=st.sampled_from(KINDS), cv=st.sampled_from([0.0, 0.4]),
       rate=st.lists(rates, min_size=81, max_size=81), matrix=st.booleans(), p=st.sampled_from([0.0, 0.1, 0.6]),
       unit=st.sampled_from(["link", "message", "round"]), at=st.sampled_from(["end", "uniform"]),
       late=st.sampled_from(["skip", "wait"]), crash=st.sampled_from([0.0, 7.0, 60.0]), pause=st.sampled_from([0.0, 20.0]),
       on_crash=st.sampled_from(["wait", "proceed"]))
def test_utilisation_is_a_share_and_time_adds_up(name, workers, seed, kind, cv, rate, matrix, p, unit, at, late, crash,
                                                 pause, on_crash):
  """In [0, 1], whatever goes wrong; every run ends; compute, down and stalled time are the round."""
  rate = np.array(rate[:workers**2]).reshape(workers, workers) if matrix else np.array(rate[:workers])
  r = netsim.simulate(plan_of(name, workers, kind), Links(rate), StepTimes((1.0,), cv), Drops(p, unit, at, late),
                      Interruptions(crash, 15.0), Interruptions(pause, 3.0, fixed=False), on_crash, rounds=6, seed=seed)
  assert 0 <= r.compute_utilization <= 1 + 1e-9 and all(0 <= u <= 1 + 1e-9 for u in r.worker_utilization)
  assert r.round_seconds == pytest.approx(r.compute_seconds + r.down_seconds + r.stall_seconds, rel=1e-6)
  shares = np.array(r.round_utilization)
  assert len(shares) == len(r.round_ends) == 6 and ((shares >= 0) & (shares <= 1 + 1e-9) | np.isnan(shares)).all()
  if on_crash == "wait":  # all finish all rounds, one after the other
    assert (np.diff(r.round_ends, prepend=0) >= 0).all()


@quick
@given(name=names, workers=st.integers(1, 8), rate=rates, factor=st.floats(1.0, 20.0), kind=st.sampled_from(KINDS))
def test_more_bandwidth_is_never_worse(name, workers, rate, factor, kind):
  slow, fast = (netsim.simulate(plan_of(name, workers, kind), Links(np.full(workers, r)), StepTimes((1.0,)), rounds=2)
                for r in (rate, rate * factor))
  assert fast.compute_utilization >= slow.compute_utilization * (1 - 1e-9)
  assert fast.bytes_overlapped == slow.bytes_overlapped and fast.bytes_blocking == slow.bytes_blocking


@quick
@given(name=names, workers=st.integers(1, 8), rate=rates, seed=seeds)
def test_without_failures_nothing_is_random(name, workers, rate, seed):
  """No seed matters, all rounds are equal, and the closed form is the simulation."""
  plan, links = plan_of(name, workers), Links(np.full(workers, rate))
  one, other = (netsim.simulate(plan, links, StepTimes((1.0,)), rounds=n, seed=s) for n, s in ((1, 0), (3, seed)))
  if all(e.mean for e in plan.exchanges):
    assert one.round_seconds == pytest.approx(other.round_seconds, rel=1e-9)
    assert other.compute_utilization == pytest.approx(closed.utilization(plan, links, 1.0), rel=1e-9)
  assert other == netsim.simulate(plan, links, StepTimes((1.0,)), rounds=3, seed=seed + 1)


@quick
@given(name=names, seed=seeds, p=st.floats(0.01, 0.7), cv=st.floats(0.01, 0.5))
def test_the_seed_decides(name, seed, p, cv):
  run = lambda seed: netsim.simulate(plan_of(name, 4), Links(np.full(4, 1e9)), StepTimes((1.0,), cv), Drops(p),
                                     Interruptions(50.0, 5.0), rounds=4, seed=seed)
  assert run(seed) == run(seed)
  assert run(seed).round_ends != run(seed + 1).round_ends  # step times vary continuously


@quick
@given(layers=st.integers(1, 12), rate=st.floats(1e7, 1e13), factor=st.floats(1.0, 10.0), fragments=st.integers(0, 4),
       delay=st.integers(0, 3))
def test_layers_properties(layers, rate, factor, fragments, delay):
  """A share; monotone in bandwidth; no worse than without overlap of the backward pass."""
  model = Layered(layers, 0.1, 1e9, 20, min(fragments, layers), delay if fragments else 0)
  slow, fast = model.utilization(rate), model.utilization(rate * factor)
  assert 0 < slow <= fast * (1 + 1e-9) and fast <= 1 + 1e-9
  alone = 20 * 0.1 / (20 * 0.1 + 1e9 * (1 if fragments else 20) / rate)
  assert slow >= alone * (1 - 1e-9)


@quick
@given(learners=st.integers(1, 8), chips=st.integers(8, 400_000), seed=seeds, elastic=st.booleans())
def test_goodput_is_a_share(learners, chips, seed, elastic):
  result = simulate_goodput(learners, chips, elastic=elastic, seconds=86400, seed=seed)
  assert 0 <= result.goodput <= result.uptime + 1e-9 <= 1 + 2e-9
