"""Simulated time of single rounds, for training that reports it: ends, utilisation, what failed, plans of bound methods."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fgd_jax as fgd
from fgd_jax import netsim
from fgd_jax.netsim.failures import Drops, Interruptions, StepTimes
from fgd_jax.netsim.links import Links

GBIT, M, H, PARAMS = 1e9, 8, 10, 1e9 / 16  # a mean takes 1.75 s at 1 Gbit/s, a swap 1 s
LINKS, SECOND = Links(np.full(M, GBIT)), StepTimes((1.0,))


def plan(method, **options):
  return netsim.make_plan(method, PARAMS, 16, M, H, options=options)


def test_rounds_end_one_after_the_other():
  """DiLoCo: 11.75 s each; with late repetitions each round ends a whole number of transfers later."""
  result = netsim.simulate(plan("diloco"), LINKS, SECOND, rounds=4)
  assert result.round_ends == pytest.approx([11.75, 23.5, 35.25, 47])
  assert result.round_utilization == pytest.approx([10 / 11.75] * 4)
  drops = Drops(0.4)
  result = netsim.simulate(plan("diloco"), LINKS, SECOND, drops, rounds=50, seed=3)
  took = np.diff(result.round_ends, prepend=0)
  tries = [1 for _ in range(50)]
  for r in range(50):  # a NumPy replay of the draws, which depend on seed, name, round and members alone
    fate = drops.attempts(3, "mix2", r, tuple(range(M)))
    while fate.next() is not None:
      tries[r] += 1
  assert max(tries) > 2
  np.testing.assert_allclose(took, 10 + 1.75 * np.array(tries))
  np.testing.assert_allclose(result.round_utilization, 10 / took)


def test_a_longer_run_begins_with_the_shorter_one():
  """A resumed run finds its rounds where they were."""
  ends = lambda rounds: netsim.simulate(plan("GlobalM1LocalM2"), LINKS, StepTimes((1.0,), 0.2), Drops(0.2), rounds=rounds,
                                        seed=7).round_ends
  np.testing.assert_array_equal(ends(20)[:9], ends(10)[:9])


def test_failures_name_the_exchange_its_round_and_workers():
  """They are the pairs of the round's matching whose draw fails; skipped means concern everybody."""
  p, drops = plan("GlobalM1LocalM2"), Drops(0.3)
  result = netsim.simulate(p, LINKS, SECOND, drops, rounds=30, seed=1)
  pairs = [f for f in result.failures if f.exchange == "mix2"]
  topology = next(e.topology for e in p.exchanges if e.name == "mix2")
  wanted = []
  for r in range(30):
    partner = np.argmax(topology.matrix(r) - np.eye(M), axis=1)  # off the diagonal the partner alone has weight
    for i in range(M):
      if i < partner[i] and drops.attempts(1, "mix2", r, (i, int(partner[i]))).next() is not None:
        wanted.append((r, "mix2", (i, int(partner[i]))))
  assert [tuple(f) for f in pairs] == wanted and result.lost_pairs * 30 == pytest.approx(len(wanted))
  slow = netsim.simulate(plan("GlobalM1"), Links(np.full(M, GBIT / 5)), SECOND, Drops(0.3), rounds=30)  # 8.75 s of 10 s
  assert {f.exchange for f in slow.failures} == {"mix1"} and {f.members for f in slow.failures} == {tuple(range(M))}
  assert len(slow.failures) == pytest.approx(30 * slow.skipped)


def test_crashes_leave_no_round_without_a_time():
  """`wait`: all workers finish all rounds, in order; the shares, weighted with the rounds' times, are the run's."""
  result = netsim.simulate(plan("diloco"), LINKS, SECOND, crashes=Interruptions(60, 30), rounds=40)
  took = np.diff(result.round_ends, prepend=0)
  assert (took >= 11.75 - 1e-9).all() and took.max() > 40
  assert np.average(result.round_utilization, weights=took) == pytest.approx(result.compute_utilization)


def bound(method, **options):
  """A round of a tiny model: what training has in its hands."""
  params = {"layers_0": {"w": jnp.zeros((8, 8))}, "layers_1": {"w": jnp.zeros((8, 8))}, "head": jnp.zeros((4, 8))}
  init, round_fn = fgd.build_round(fgd.methods.make(method, **options), lambda p, b, rng: jnp.sum(p["head"]) * jnp.mean(b),
                                   optax.sgd(0.1), workers=fgd.Workers(4))
  traffic = round_fn.traffic(round_fn.abstract_state(params).params, jax.ShapeDtypeStruct((4, 6, 1), jnp.float32))
  return netsim.plan_of_method(method, round_fn.method, 4, 6, traffic, params), round_fn


@pytest.mark.parametrize("method, options, overlapped, blocking", [
    ("diloco", {}, 0, 1.5 * 640), ("GlobalM1LocalM2", {}, 1.5 * 640, 640), ("local", {}, 0, 0),
    ("diloco", {"codec": "bf16"}, 0, 3 * 320), ("fgd", {"mix1": "identity", "mix2": "ring"}, 0, 2 * 640),
    ("data_parallel", {}, 0, 6 * 1.5 * 640), ("streaming_diloco", {"fragments": 3, "delay": 1}, 1.5 * 640, 0),
    ("streaming_diloco", {"fragments": 3, "delay": 0}, 0, 1.5 * 640), ("pipelined_diloco", {"fragments": 2}, 1.5 * 640, 0)])
def test_plan_of_a_bound_method(method, options, overlapped, blocking):
  """Bytes as the round counts them (640 bytes of float32); the exchanges' topologies are the bound method's own."""
  made, round_fn = bound(method, **options)
  assert (made.bytes_overlapped, made.bytes_blocking) == pytest.approx((overlapped, blocking))
  topologies = [mixer.topology for mixer in round_fn.method.bound_mixers()]
  assert all(e.topology in topologies for e in made.exchanges)
  if options.get("fragments") == 3:  # layers of 256 bytes each, the head of 128
    assert sorted(e.nbytes for e in made.exchanges) == pytest.approx([128, 256, 256])


@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("method", ["data_parallel", "diloco", "eager_diloco", "GlobalM1", "GlobalM1LocalM2", "LocalM1M2",
                                    "noloco", "gasloc"])
def test_plans_by_name_are_those_of_bound_methods(method, codec):
  """Bytes, kinds and times of every exchange, of 160 parameters; noloco compresses one of its two swaps."""
  made, _ = bound(method, codec=codec)
  named = netsim.make_plan(method, 160, 32, 4, 6, options={"codec": codec})
  facts = lambda plan: [(e.name, pytest.approx(e.nbytes), e.start, e.due, e.kind, e.topology.name) for e in plan.exchanges]
  assert facts(named) == facts(made) and named.bytes_blocking == pytest.approx(made.bytes_blocking)


def test_a_compressed_mean_takes_the_time_of_an_all_gather():
  """DiLoCo in bf16: 3 x 320 bytes through every link of 8 x 320 bits a second."""
  made, _ = bound("diloco", codec="bf16")
  result = netsim.simulate(made, Links(np.full(4, 8 * 320.0)), SECOND, rounds=1)
  assert result.round_seconds == pytest.approx(6 + 3)


def test_workers_with_steps_of_their_own():
  """GASLoC's inner_steps: each worker computes its own number of steps, and its partner waits for the longer one."""
  made, _ = bound("gasloc", inner_steps=(6, 6, 3, 3))
  result = netsim.simulate(made, Links(np.full(4, 8 * 640.0)), SECOND, rounds=1)
  assert result.compute_seconds == pytest.approx(4.5) and result.round_ends == pytest.approx([7.0])
