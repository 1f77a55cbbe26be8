"""Exchanges that fail and workers that go down, in mixers, rounds and whole runs; simulated time."""

import functools
import itertools
import json
import os
import signal
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_methods import INNER, START, data, gradient, least_squares
from test_mixer import assert_close, path, stack_of, workers_on
from test_train import ROOT, TINY, command, environment, files_of, lines, run, saved_state

import fgd_jax as fgd
from fgd_jax import faults, netsim
from fgd_jax import train as trainer
from fgd_jax.default_config import get_config
from fgd_jax.mixing import Context

# --- mixers ------------------------------------------------------------------------------------------------------------


def random_links(m, seed):
  rng = np.random.default_rng(seed)
  links = rng.random((m, m)) < 0.6
  links = np.triu(links) | np.triu(links, 1).T
  np.fill_diagonal(links, rng.random(m) < 0.8)
  return links


def exchanged(mixer, devices, r, stack, links):
  """(finish(start), blocking call) of round r with these links."""
  count = mixer.topology.workers
  workers, choice = workers_on(devices, count), mixer.topology.choice(r)
  context = lambda ids, links, choice: Context(workers.placement, jnp.int32(0), ids, jnp.ones(count, bool), {"mix": choice},
                                               links={"mix": links})

  def overlapped(stack, ids, links):
    ctx = context(ids, links, choice)
    return mixer.finish(mixer.start(stack, ctx), stack, ctx)

  def blocking(stack, ids, links):
    ctx = context(ids, links, jnp.int32(choice))
    return workers.each(lambda x, worker: mixer(x, ctx._replace(worker=worker)), stack, ids)

  ids = jnp.arange(count, dtype=jnp.int32)
  return [jax.jit(workers.spmd(body, stacks=2))(stack, ids, links[None]) for body in (overlapped, blocking)]


CASES = [(t, 8, d) for t in ("global", "random_pairs", "ring", "hypercube", "striped_pairs", "one_peer_exponential")
         for d in (None, 8)] + [("random_pairs", 8, 4), ("random_groups", 8, None), ("random_pairs", 5, 5)]


@pytest.mark.parametrize("topology, m, devices", CASES)
def test_failed_links_are_in_the_matrix_and_keep_the_mean(x64, topology, m, devices):
  mixer = fgd.mixing.make(topology, workers=m, seed=7)
  stack, links = stack_of(m), random_links(m, seed=m)

  def product(keys, x):
    kwargs = {"stripe": mixer.stripe_of(path(keys))} if topology.startswith("striped") else {}
    w = mixer.matrix(1, links=links, **kwargs)
    np.testing.assert_allclose(w.sum(0), 1, atol=1e-15)
    np.testing.assert_allclose(w.sum(1), 1, atol=1e-15)
    return np.tensordot(w, x, axes=1)

  want = jax.tree_util.tree_map_with_path(product, stack)
  for got in exchanged(mixer, devices, 1, stack, links):
    assert_close(got, want, atol=1e-13, rtol=0)


def test_matrix_with_failed_links_by_hand():
  """Four workers in a ring, 1/3 each, the link 0-1 down and worker 2 out."""
  links = np.ones((4, 4), bool)
  links[0, 1] = links[1, 0] = links[2, 2] = False
  w = fgd.mixing.make("ring", workers=4).matrix(0, links=links)
  np.testing.assert_allclose(w, [[2 / 3, 0, 0, 1 / 3], [0, 1, 0, 0], [0, 0, 1, 0], [1 / 3, 0, 0, 2 / 3]], atol=1e-15)
  whole = fgd.mixing.make("one_peer_exponential", workers=4).matrix(0, links=links)  # directed: dropped whole
  np.testing.assert_allclose(whole, np.eye(4), atol=1e-15)


@pytest.mark.parametrize("m, q", [(4, 0.3), (8, 0.05), (6, 0.5)])
def test_contraction_of_pairs_that_fail(m, q):
  """rho_q = 1 - (1 - q)(1 - rho) exactly, by adding up all matchings and all ways to fail; rho = (M-2) / (2 (M-1))."""
  topology = fgd.mixing.make("random_pairs", workers=m).topology
  mean, second = np.full((m, m), 1 / m), np.zeros((m, m))
  for pattern in topology.bank:
    source = np.asarray(pattern.terms[0][1])
    pairs = [(i, int(j)) for i, j in enumerate(source) if i < j]
    for failing in itertools.product([False, True], repeat=len(pairs)):
      links = np.ones((m, m), bool)
      for (i, j), fails in zip(pairs, failing):
        links[i, j] = links[j, i] = not fails
      w = pattern.matrix(m, links=links) - mean
      second += w.T @ w * q ** sum(failing) * (1 - q) ** (len(pairs) - sum(failing)) / len(topology.bank)
  assert np.linalg.eigvalsh(second)[-1] == pytest.approx(1 - (1 - q) * (1 - (m - 2) / (2 * (m - 1))), rel=1e-12)


# --- rounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, inner, devices", [("LocalM1M2", "adamw", None), ("LocalM1M2", "sgd", 4),
                                                  ("GlobalM1LocalM2", "sgd", None), ("GlobalM1LocalM2", "sgd", 4),
                                                  ("diloco", "sgd", None)])
def test_rounds_follow_the_matrices(x64, name, inner, devices):
  """z' = W1 z - lr (D + mu buf') with matrices that know which links failed; a mean that was given up is the identity."""
  m, lr, mu = 4, 0.6, 0.8
  mesh = None if devices is None else jax.make_mesh((devices,), ("worker",), devices=jax.devices()[:devices])
  batches, optimizer = data(m), INNER[inner]()
  init, round_fn = fgd.build_round(fgd.methods.make(name, outer_lr=lr, outer_momentum=mu), least_squares, optimizer.optax,
                                   workers=fgd.Workers(m, mesh), seed=3, faults=True)
  bound, state = round_fn.method, init(START)
  z = {k: np.repeat(v[None], m, 0) for k, v in START.items()}
  buf, moments = {k: np.zeros_like(v) for k, v in z.items()}, optimizer.init(z)
  for r, batch in enumerate(batches):
    links = {"mix2": random_links(m, seed=r)}
    np.fill_diagonal(links["mix2"], True)
    if name != "diloco":
      links["mix1"] = np.zeros((m, m), bool) if r == 1 else links["mix2"] if name == "LocalM1M2" else np.ones((m, m), bool)
    else:
      links = {}
    state, _ = round_fn(state, batch, links=links)
    w = z
    for h in range(batch["x"].shape[1]):
      _, g = gradient(w, batch["x"][:, h], batch["y"][:, h])
      w, moments = optimizer.step(w, g, moments)
    w1 = np.eye(m) if name == "diloco" else bound.mix1.matrix(r, links=links["mix1"])
    w2 = bound.mix2.matrix(r, links=links.get("mix2"))
    for k in z:
      d = np.tensordot(w2, z[k] - w[k], axes=1)
      buf[k] = mu * buf[k] + d
      z[k] = np.tensordot(w1, z[k], axes=1) - lr * (d + mu * buf[k])
      np.testing.assert_allclose(np.asarray(state.params[k]), z[k], rtol=1e-11, atol=1e-11, err_msg=f"round {r}")


@pytest.mark.parametrize("name, options", [("streaming_diloco", {"fragments": 1, "delay": 1, "blend": 0.0}),
                                           ("pipelined_diloco", {"fragments": 1})])
def test_a_fragment_that_was_given_up_goes_with_the_next_exchange(x64, name, options):
  """Constant gradients, SGD inside, outer SGD 1: after a failure theta stays, and then moves by two rounds at once."""
  m, steps, lr = 4, 3, 0.1
  g = np.random.default_rng(0).normal(size=(m, 1, 2))
  init, round_fn = fgd.build_round(fgd.methods.make(name, outer_lr=1.0, outer_momentum=0.0, **options),
                                   lambda p, batch, rng: jnp.sum(p["a"] * batch[0]), optax.sgd(lr), workers=fgd.Workers(m),
                                   faults=True)
  state, thetas = init({"a": np.zeros(2)}), []
  for r in range(4):
    links = {"mix1": np.zeros((m, m), bool)} if r == 2 else None
    state, _ = round_fn(state, np.repeat(g[:, None], steps, 1), links=links)
    theta = jax.tree.map(lambda x: np.asarray(x)[:, 0], state.method_state[0]["theta"])
    theta = np.concatenate([np.asarray(x).reshape(m, -1) for x in jax.tree.leaves(theta)], axis=1)
    np.testing.assert_allclose(theta, np.broadcast_to(theta[:1], theta.shape), atol=1e-15)  # nobody has its own
    thetas.append(theta[0])
  moves = np.diff([np.zeros(2), *thetas], axis=0)
  mean = g[:, 0].mean(0)
  # With blend 0 a worker drops the step made in flight, so that a round after an arrival has moved it by H - 1 steps.
  first = steps * lr * mean
  usual = (steps - 1) * lr * mean if name == "streaming_diloco" else steps * lr * mean
  np.testing.assert_allclose(moves[0], 0, atol=1e-15)
  np.testing.assert_allclose(moves[1], -first, rtol=1e-12)
  np.testing.assert_allclose(moves[2], 0, atol=1e-15)
  np.testing.assert_allclose(moves[3], -(usual + steps * lr * mean), rtol=1e-12)


def test_links_need_a_round_with_drops_and_the_right_shape(x64):
  build = lambda **kwargs: fgd.build_round(fgd.methods.make("LocalM1M2"), least_squares, optax.sgd(0.1),
                                           workers=fgd.Workers(4), **kwargs)
  batch = data(4, 1)[0]
  init, round_fn = build()
  with pytest.raises(ValueError, match="faults=True"):
    round_fn(init(START), batch, links={})
  init, round_fn = build(faults=True)
  one_sided = np.ones((4, 4), bool)
  one_sided[0, 1] = False
  for links, words in (({"mix3": one_sided}, "mix3"), ({"mix2": one_sided}, "symmetric"),
                       ({"mix2": np.ones((3, 3), bool)}, r"\(1, 4, 4\)")):
    with pytest.raises(ValueError, match=words):
      round_fn(init(START), batch, links=links)


# --- the faults of a run ----------------------------------------------------------------------------------------------


@functools.cache
def played(settings):
  """The faults of a run of configs/default.py with these settings, and its bound method."""
  config = get_config(TINY + "," + settings)
  init, round_fn = fgd.build_round(trainer.configs.make_method(config), least_squares, optax.sgd(0.1),
                                   workers=fgd.Workers(config.workers), seed=config.seed)
  params = {k: jax.ShapeDtypeStruct((config.workers, *v.shape), np.float32) for k, v in START.items()}
  batches = {"x": jax.ShapeDtypeStruct((config.workers, config.inner_steps, 4, 3), np.float32)}
  return faults.simulate(config, round_fn, params, batches)


def test_pairs_fail_as_often_as_asked_and_contract_as_predicted():
  """1500 rounds of LocalM1M2, M = 4, q = 0.25: the share of failed swaps within four standard errors, and the contraction of
  the replayed matrices against 1 - (1 - q)(1 - 1/3) = 0.5 (statistical error: about 0.01)."""
  q, rounds = 0.25, 1500
  run = played(f"method=LocalM1M2,rounds={rounds},faults.drop={q}")
  swaps = 2 * rounds
  for key in ("mix1", "mix2"):
    failed, second = 0, np.zeros((4, 4))
    for r in range(rounds):
      links = run.links(r).get(key, np.ones((4, 4), bool))
      failed += (~links).sum() // 2
      w = getattr(run.method, key).matrix(r, links=links) - 1 / 4
      second += w.T @ w / rounds
    assert abs(failed - q * swaps) < 4 * np.sqrt(swaps * q * (1 - q))
    assert np.linalg.eigvalsh(second)[-1] == pytest.approx(0.5, abs=0.04)
  assert run.alive.all()


def test_only_pairs_that_meet_fail():
  run = played("method=LocalM1M2,rounds=200,faults.drop=0.3,workers=8")
  for r in range(200):
    for key, links in run.links(r).items():
      mixer = getattr(run.method, key)
      _, source = mixer.topology.bank[mixer.topology.choice(r)].terms[0]
      for i, j in np.argwhere(~links):
        assert source[i] == j


def test_faults_are_the_same_for_a_longer_run_and_other_seeds_differ():
  short, long = (played(f"method=LocalM1M2,rounds={n},faults.drop=0.2,inner.schedule=constant") for n in (40, 60))
  assert [short.failures.get(r) for r in range(40)] == [long.failures.get(r) for r in range(40)]
  np.testing.assert_array_equal(short.seconds, long.seconds[:40])
  other = played("method=LocalM1M2,rounds=40,faults.drop=0.2,inner.schedule=constant,faults.seed=5")
  assert [other.failures.get(r) for r in range(40)] != [short.failures.get(r) for r in range(40)]


@pytest.mark.parametrize("method, seconds", [
    # M = 4, H = 2 steps of 1 s; S = 8 parameters x 4 bytes; at 64 bit/s a ring takes 2 (3/4) S / B = 6 s, a swap 4 s
    ("diloco", 2 + 6), ("GlobalM1", max(2, 6)), ("GlobalM1LocalM2", max(2, 6) + 4), ("LocalM1M2", max(2, 4) + 4),
    ("data_parallel", 2 * (1 + 6)), ("local", 2)])
def test_simulated_time_is_the_formula(method, seconds):
  """Section 4.6: round = max(T_compute, T_mix1) + T_mix2."""
  run = played(f"method={method},rounds=5,network.bandwidth=64bps")
  np.testing.assert_allclose(run.seconds, seconds * np.arange(1, 6), rtol=1e-9)
  np.testing.assert_allclose(run.utilization, 2 / seconds, rtol=1e-9)
  assert not run.failures


def test_blocking_means_are_repeated_and_only_cost_time():
  """DiLoCo: attempts are geometric, T_mix2 / (1 - q) on average; nothing fails in training."""
  q = 0.4
  run = played(f"method=diloco,rounds=2000,network.bandwidth=64bps,faults.drop={q}")
  assert not run.failures
  mean, error = 2 + 6 / (1 - q), 6 * np.sqrt(q) / (1 - q) / np.sqrt(2000)
  assert abs(run.seconds[-1] / 2000 - mean) < 4 * error


@pytest.mark.parametrize("late", ["skip", "wait"])
def test_late_means_are_given_up_or_waited_for(late):
  run = played(f"method=GlobalM1,rounds=400,network.bandwidth=64bps,faults.drop=0.2,faults.late_mix1={late}")
  if late == "wait":
    assert not run.failures
  else:
    assert abs(len(run.failures) - 0.2 * 400) < 4 * np.sqrt(400 * 0.2 * 0.8)  # compute is shorter than one attempt
    r = next(iter(run.failures))
    assert not run.links(r)["mix1"].any()


def test_fragments_are_numbered_as_the_round_has_them():
  """P = 2: with a delay slot 0 carries fragment 0; without one, slot 0 ends where fragment 1 is due."""
  failure = {0: [netsim.Failure(0, "fragment 1", (0, 1, 2, 3))]}
  ones = np.ones((1, 4), bool)
  for delay, slot in ((1, 1), (0, 0)):
    method = fgd.methods.make("streaming_diloco", fragments=2, delay=delay).bind(4)
    (table,) = faults.Faults(method, ones, failure, np.ones(1), np.ones(1)).links(0).values()
    assert table.shape == (2, 4, 4) and not table[slot].any() and table[1 - slot].all()


def test_who_rejoins_from_whom():
  """The donor is the next of those that were there last: in round 5 that was in round 3, without worker 2."""
  alive = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]], bool)
  run = faults.Faults(fgd.methods.make("diloco").bind(3), alive, {}, np.ones(6), np.ones(6))
  assert [run.rejoining(r) for r in range(6)] == [[], [], [], [(0, 2), (1, 2)], [], [(2, 0)]]
  assert [(e["event"], e["worker"]) for e in run.events(3, 10)] == [("down", 2), ("back", 0), ("back", 1)]
  assert run.events(3, 10)[1] == {"round": 4, "step": 30, "event": "back", "worker": 0, "donor": 2}


def test_crashes_take_workers_out_for_whole_rounds():
  run = played("method=GlobalM1LocalM2,rounds=300,faults.crash_every=40,faults.crash_seconds=6")
  down = ~run.alive
  assert 0 < down.mean() < 0.5
  for m in range(4):  # 6 s are at least two rounds of 2 s and the one in which it went down
    edges = np.flatnonzero(np.diff(np.concatenate([[0], down[:, m], [0]])))
    lengths = edges[1::2] - edges[::2]
    assert all(length >= 3 for length, end in zip(lengths, edges[1::2]) if end < 300)
  waiting = played("method=GlobalM1LocalM2,rounds=300,faults.crash_every=40,faults.crash_seconds=6,faults.on_crash=wait")
  assert waiting.alive.all() and waiting.seconds[-1] > run.seconds[-1]


# --- whole runs --------------------------------------------------------------------------------------------------------

FAULTY = ["--config.faults.drop=0.3", "--config.faults.crash_every=6", "--config.faults.crash_seconds=3",
          "--config.rounds=8", "--config.faults.quarantine=True"]


def events(workdir):
  with open(os.path.join(workdir, "events.jsonl")) as f:
    return [json.loads(line) for line in f]


def test_a_run_through_faults_resumes_bit_for_bit(tmp_path):
  whole = str(tmp_path / "whole")
  done = run(whole, *FAULTY)
  assert done.returncode == 0, done.stderr[-2000:]
  records = lines(whole)
  assert [set(r) >= {"simulated_seconds", "compute_utilization", "failed_exchanges", "workers_alive", "quarantined"}
          for r in records] == [True] * 8
  assert all(0 < r["compute_utilization"] <= 1 for r in records)
  assert np.all(np.diff([r["simulated_seconds"] for r in records]) > 0)
  tokens = 2 * 2 * 16 * np.cumsum([r["workers_alive"] for r in records])  # H x batch x length of those that are there
  assert [r["tokens"] for r in records] == tokens.tolist()
  assert {e["event"] for e in events(whole)} == {"down", "back"} and sum(r["failed_exchanges"] for r in records) > 0

  killed = str(tmp_path / "killed")
  process = subprocess.Popen(command(killed, *FAULTY), cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
  deadline = time.time() + 600
  while time.time() < deadline and process.poll() is None:
    if os.path.exists(f"{killed}/metrics.jsonl") and len(lines(killed)) >= 4:
      break
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.wait()
  again = run(killed, *FAULTY)
  assert again.returncode == 0, again.stderr[-2000:]
  assert lines(killed) == records and events(killed) == events(whole)
  for a, b in zip(*(jax.tree.leaves(saved_state(workdir, 8)) for workdir in (killed, whole)), strict=True):
    np.testing.assert_array_equal(a, b)


def poisoned_models(monkeypatch, workers, rounds_of):
  """Models whose loss is NaN for chosen workers, by the first token of their batch."""
  make = trainer.models.make
  marked = set()

  def poisoned(config):
    model = make(config)

    def loss(params, batch, rng):
      bad = jnp.isin(jnp.sum(batch["tokens"]), jnp.asarray(sorted(marked), jnp.int32))
      return jnp.where(bad, jnp.nan, model.loss(params, batch, rng))

    return model._replace(loss=loss)

  round_batches = trainer.data.round_batches

  def watched(*args):
    batches = round_batches(*args)
    for r in rounds_of:
      marked.update(int(batches[r]["tokens"][w, 1].sum()) for w in workers)
    return batches

  monkeypatch.setattr(trainer.models, "make", poisoned)
  monkeypatch.setattr(trainer.data, "round_batches", watched)


def test_quarantine_is_logged_with_worker_step_and_cause(monkeypatch, tmp_path):
  poisoned_models(monkeypatch, [1, 3], [1])
  trainer.train(get_config(TINY + ",faults.quarantine=true"), str(tmp_path))
  assert events(str(tmp_path)) == [
      {"round": 2, "step": 4, "event": "quarantine", "worker": w, "cause": "loss"} for w in (1, 3)]
  records = lines(str(tmp_path))
  assert [r["quarantined"] for r in records] == [0, 2, 0, 0] and all(np.isfinite(r["train_loss"]) for r in records)


def test_a_run_in_which_everybody_is_sick_stops_with_a_sentence(monkeypatch, tmp_path):
  poisoned_models(monkeypatch, range(4), [2])
  with pytest.raises(trainer.NonFiniteError, match="All 4 workers are in quarantine in round 3"):
    trainer.train(get_config(TINY + ",faults.quarantine=true"), str(tmp_path))
  assert files_of(str(tmp_path / "checkpoints"))


@pytest.mark.parametrize("option, words", [
    ("faults.drop=1.5", "faults.drop=1.5"), ("faults.drop=-0.1", "at least 0"),
    ("faults.drop=0.1,faults.drop_unit=bolt", "faults.drop_unit='bolt'"),
    ("faults.drop=0.1,faults.late_mix1=hope", "faults.late_mix1='hope'"),
    ("faults.crash_every=9,faults.crash_seconds=1,faults.on_crash=cry", "faults.on_crash='cry'"),
    ("faults.crash_every=5", "faults.crash_seconds"),
    ("faults.crash_seconds=5", "no effect without faults.crash_every"), ("faults.late_mix1=wait", "without faults.drop"),
    ("network.latency=5", "without network.bandwidth"), ("faults.seed=-1,faults.drop=0.1", "faults.seed=-1"),
    ("network.bandwidth=1Gbps,network.transfer=bad", "network.transfer='bad'"),
    ("faults.crash_every=1e-3,faults.crash_seconds=1", "no worker ever finishes a round"),
    ("network.bandwidth=fast", "network.bandwidth='fast'"),
    ("network.bandwidth=1Gbps,network.step_seconds=1;2", "workers=4"),
    ("network.bandwidth=1Gbps,network.step_seconds=-1", "network.step_seconds='-1'"),
    ("network.bandwidth=1Gbps,network.jitter=much", "network.jitter='much'"),
    ("faults.quarantine=true,worker_weights=1;1;1;2", "worker_weights")])
def test_bad_faults_stop_at_start(option, words, tmp_path):
  with pytest.raises(ValueError, match=words.replace("(", r"\(")):
    trainer.train(get_config(TINY + "," + option), str(tmp_path / "run"))
