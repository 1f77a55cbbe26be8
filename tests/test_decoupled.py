"""Decoupled DiLoCo without Ray: rules of learners and syncer against the spec, and against the SPMD round."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decoupled_helpers import INNER, Cluster, batch, loss, options, start
from jax.sharding import PartitionSpec
from ml_collections import config_flags

import fgd_jax as fgd
from fgd_jax import data, sharding
from fgd_jax.decoupled.grace import Grace
from fgd_jax.decoupled.learner import Arrived, LearnerCore, Opened
from fgd_jax.decoupled.merging import Merger, merge, token_weight
from fgd_jax.decoupled.options import check, fingerprint, refuse_mismatch, schedule_config
from fgd_jax.decoupled.programs import Programs, make_programs
from fgd_jax.decoupled.replay import Replay
from fgd_jax.decoupled.store import Store, read_tape
from fgd_jax.decoupled.syncer import Contribution, SyncerCore
from fgd_jax.default_config import get_config
from fgd_jax.mixing.fragments import make_fragments
from fgd_jax.outer import delayed_nesterov
from fgd_jax.outer.merge import make_aggregator


def difference(a, b):
  return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y))), a, b)))


# --- against the SPMD round -----------------------------------------------------------------------------------------


def spmd(method, rounds, m, h):
  """Outer parameters after so many rounds of the SPMD path, with the cluster's model and batches."""
  init, round_fn = fgd.build_round(method, loss, INNER, workers=fgd.Workers(m))
  state = init(start())
  for r in range(rounds):
    rows = [[batch(i, r * h + j) for j in range(h)] for i in range(m)]
    state, _ = round_fn(state, {k: np.stack([np.stack([b[k] for b in row]) for row in rows]) for k in ("x", "y")})
  return round_fn.eval_params(state)


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_equal_learners_with_full_quorum_are_diloco(x64, merge):
  cluster = Cluster(options(learners=3, quorum=3, inner_steps=4, fragments=1, merge=merge))
  cluster.run(3 * 4 + 1.5)
  assert [r["step"] for r in cluster.records] == [1, 2, 3]
  assert all(len(r["contributions"]) == 3 for r in cluster.records)
  want = spmd(fgd.methods.make("diloco", outer_lr=0.7, outer_momentum=0.9, aggregator=merge), 3, 3, 4)
  assert difference(cluster.theta(), want) < 1e-12


@pytest.mark.parametrize("blend, syncers, codec", [(0.25, 3, None), (0.0, 1, "int8")])
def test_equal_learners_with_full_quorum_are_streaming_diloco(x64, blend, syncers, codec):
  more = {} if codec is None else {"codec": codec, "error_feedback": True}
  cluster = Cluster(options(learners=2, quorum=2, inner_steps=6, fragments=3, blend=blend, syncers=syncers, **more))
  cluster.run(3 * 6 + 1.5)
  method = fgd.methods.make("streaming_diloco", fragments=3, order="balanced", delay=0, blend=blend, outer_lr=0.7,
                            outer_momentum=0.9, **more)
  assert difference(cluster.theta(), spmd(method, 3, 2, 6)) < 1e-12


def test_a_tape_that_lands_fragments_tau_steps_late_is_streaming_diloco_with_that_delay(x64):
  h, parts, tau, m, rounds = 6, 2, 2, 2, 3
  o = options(learners=m, inner_steps=h, fragments=parts, blend=0.5)
  shapes = jax.eval_shape(start)
  ops = [["join", 0, {"0": 0, "1": 0}, "fresh"]]
  due = [(h + i * h // parts, i + 1) for i in range((rounds - 1) * parts)]  # (inner step, syncer step)
  for n, t in due:
    ops += [["offer", n, t], ["apply", n + tau, t]]
  lines, at = [], 0
  for n, t in due:
    seq = ops.index(["offer", n, t])
    part = {"life": 1, "seq": seq, "steps": 1, "tokens": 8, "ops_from": at, "ops": ops[at:seq + 1]}
    lines.append({"step": t, "fragment": (t - 1) % parts, "time": n, "slots": m, "checksum": 0,
                  "contributions": [{"learner": i, **part} for i in range(m)]})
    at = seq + 1
  player = Replay(Programs(o, shapes, loss, INNER), Merger(o, shapes, 0), start(),
                  lambda i: {n: batch(i, n) for n in range(h * rounds)}, lines)
  assert [t for t, _ in player.play()] == [t for _, t in due]
  method = fgd.methods.make("streaming_diloco", fragments=parts, order="balanced", delay=tau, blend=0.5, outer_lr=0.7,
                            outer_momentum=0.9)
  # The last fragment of the SPMD run lands within its last round.
  got = Programs(o, shapes, loss, INNER).assemble(player.theta)
  assert difference(got, spmd(method, rounds, m, h)) < 1e-12


# --- merge, weights, fragments --------------------------------------------------------------------------------------


def test_token_weight_is_quantity_times_quality():
  assert token_weight(300, 6) == 300 * (300 / 6)
  assert token_weight(0, 0) == 0
  # Twice the batch for the same steps counts four times; twice the steps counts twice.
  assert token_weight(200, 4) == 4 * token_weight(100, 4)
  assert token_weight(200, 8) == 2 * token_weight(100, 4)


def rda(deltas, s):
  """Section 8.3 in NumPy."""
  phi = lambda x: x / np.linalg.norm(x) if np.linalg.norm(x) else x * 0
  total = sum(s)
  norm = sum(w * np.linalg.norm(d) for w, d in zip(s, deltas)) / total
  return norm * phi(sum(w * phi(d) for w, d in zip(s, deltas)) / total)


def test_merge_is_rda_by_tensor_and_the_weighted_mean_for_embeddings(x64):
  draw = np.random.default_rng(0)
  names = ["embed/embedding", "layers_0/mlp/kernel", "lm_head/kernel"]
  stack = {k: draw.normal(size=(4, 3, 2)) for k in names}
  stack["layers/attn/kernel"] = draw.normal(size=(4, 2, 3, 3))  # stacked layers: each a tensor of its own
  s = np.array([3.0, 0.0, 1.0, 2.0])
  for x in stack.values():
    x[1] = np.nan  # a missing learner's row, weight 0
  got = jax.jit(lambda stack, s: merge(make_aggregator("rda"), stack, s, jax.random.key(0)))(stack, s)
  there = [0, 2, 3]
  want = {k: rda([stack[k][m] for m in there], s[there]) for k in names[1:]}
  want["embed/embedding"] = sum(s[m] * stack["embed/embedding"][m] for m in there) / s.sum()
  want["layers/attn/kernel"] = np.stack([rda([stack["layers/attn/kernel"][m, i] for m in there], s[there]) for i in (0, 1)])
  for k, x in want.items():
    np.testing.assert_allclose(got[k], x, rtol=0, atol=1e-14, err_msg=k)


def test_weighted_mean_merge(x64):
  x = np.random.default_rng(1).normal(size=(3, 5))
  x[2] = np.inf
  got = merge(make_aggregator("mean"), {"w": x}, jnp.array([1.0, 3.0, 0.0]), jax.random.key(0))["w"]
  np.testing.assert_allclose(got, (x[0] + 3 * x[1]) / 4, atol=1e-15)


def sizes(fragments):
  return [sum(int(np.prod(x.shape)) for x in fragments.shape(p).values()) for p in range(fragments.count)]


def test_balanced_fragments_are_within_four_thirds_of_the_best_partition():
  draw = np.random.default_rng(0)
  for _ in range(20):
    tree = {f"layers_{i}": {"kernel": np.zeros(int(draw.integers(1, 40)))} for i in range(7)}
    tree["embed"] = {"embedding": np.zeros(100)}
    got = sizes(make_fragments(4, "balanced", tree))
    weights = [x["kernel"].size for k, x in tree.items() if k != "embed"]
    best = min(max(sum(w for w, b in zip(weights, bins) if b == i) for i in range(3))
               for bins in itertools.product(range(3), repeat=7))
    assert got[-1] == 100 and max(got[:-1]) <= 4 / 3 * best + 1e-9 and sum(got) == 100 + sum(weights)


def test_balanced_fragments_follow_the_greedy_rule_by_hand():
  tree = {"layers_0": {"a": np.zeros(4), "b": np.zeros(7)}, "layers_1": {"a": np.zeros(7), "b": np.zeros(5)},
          "wte": np.zeros(3)}
  # 7 (layers_0/b) -> first, 7 (layers_1/a) -> second, 5 -> first (equal loads), 4 -> second
  fragments = make_fragments(3, "balanced", tree)
  assert sizes(fragments) == [12, 11, 3]
  marked = jax.tree.map(lambda x: x + 1, tree)
  first = fragments.put(tree, 0, fragments.take(marked, 0))
  assert [float(x.sum()) for x in jax.tree.leaves(first)] == [0, 7, 0, 5, 0]


def test_balanced_fragments_cut_stacked_layers_and_cover_everything_once():
  tree = {"embed": {"embedding": jnp.zeros((3, 2))}, "layers": {"a": jnp.zeros((5, 4)), "b": jnp.zeros((5, 2, 3))}}
  fragments = make_fragments(4, "balanced", tree)
  counts = tree
  for p in range(4):
    counts = fragments.put(counts, p, jax.tree.map(lambda x: x + 1, fragments.take(counts, p)))
  assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(counts))
  assert sizes(fragments)[-1] == 6 and max(sizes(fragments)[:-1]) - min(sizes(fragments)[:-1]) <= 6
  with pytest.raises(ValueError, match="fragments=12.*10 tensors.*ask for fewer"):
    make_fragments(12, "balanced", tree)


# --- grace ----------------------------------------------------------------------------------------------------------


def test_grace_window_is_equation_3():
  grace = Grace(gamma=0.8, cap=5.0, overlap=2)
  grace.observe(step=1.0, quorum=0.3, sync=0.2)
  assert grace.window() == pytest.approx(0.8 * (2 * 1.0 - 0.3 - 0.2))
  grace.observe(step=2.0)  # a moving average with decay 0.9
  assert grace.window() == pytest.approx(0.8 * (2 * 1.1 - 0.3 - 0.2))
  grace.observe(quorum=100.0)
  assert grace.window() == 0
  short = Grace(gamma=0.8, cap=0.5, overlap=2)
  short.observe(step=1.0)
  assert short.window() == 0.5
  assert Grace(0.0, 5.0, 2).window() == 0


# --- quorum and failures in virtual time ----------------------------------------------------------------------------


def steps_by(cluster, learner):
  return [r["step"] for r in cluster.records if any(c["learner"] == learner for c in r["contributions"])]


ASYNC = dict(learners=3, quorum=1, inner_steps=4, fragments=4, overlap=2, grace=0.9, merge="rda", silent_after=3.5)


def test_a_quorum_of_one_goes_at_the_pace_of_the_fastest_and_grace_takes_the_others_in(x64):
  cluster = Cluster(options(**ASYNC), speeds=[1.0, 1.0, 1.7])
  cluster.run(40)
  fast = cluster.learners[0]
  assert fast.n == 40  # never waited
  # One step for each inner step of the fast ones would be 37; the window is below 2 x 1.7 s, so at least every fourth.
  assert 10 <= len(cluster.records) <= 37
  assert all(len(r["contributions"]) == 3 for r in cluster.records[5:])
  assert all(r["grace_seconds"] <= 0.9 * 2 * 1.7 + 1e-9 for r in cluster.records)


def test_without_grace_a_quorum_of_one_merges_each_contribution_by_itself(x64):
  cluster = Cluster(options(**{**ASYNC, "grace": 0.0}), speeds=[1.0, 1.0, 5.0])
  cluster.run(60)
  assert all(len(r["contributions"]) == 1 and r["grace_seconds"] == 0 for r in cluster.records)
  # After the first cycle of 4 inner steps the fast ones contribute once an inner step. The slow one never has news: every
  # fragment is merged 2 to 3 times in one of its inner steps, and what arrives takes the place of what it did.
  assert [len(steps_by(cluster, m)) for m in range(3)] == [60 - 4, 60 - 4, 0]


def test_a_silent_learner_is_not_waited_for_and_gets_everything_when_it_is_back(x64):
  cluster = Cluster(options(**{**ASYNC, "blend": 0.5}))
  cluster.run(10)
  paused = cluster.next.pop(2)
  cluster.run(20)
  events = [e["event"] for s in cluster.syncers for e in s.events if e["actor"] == "learner 2"]
  assert events == ["joined", "trains", "silent"]
  assert cluster.learners[0].n == 30
  late = [r for r in cluster.records if r["time"] > paused + 5]
  assert len(late) >= 10 and all(len(r["contributions"]) == 2 and r["grace_seconds"] == 0 for r in late)
  cluster.next[2] = cluster.now + 1
  cluster.run(1.0)
  core = cluster.learners[2]
  # It missed merges of every fragment, so it took the global values although others blend half.
  assert all(core.version[p] == cluster.syncers[0].version[p] for p in range(4))
  cluster.run(5)
  assert [e["event"] for e in cluster.syncers[0].events if e["actor"] == "learner 2"][-1] == "back"
  assert steps_by(cluster, 2)[-1] == cluster.records[-1]["step"]


def test_a_quorum_of_two_waits_for_two(x64):
  cluster = Cluster(options(**{**ASYNC, "quorum": 2, "learners": 2}))
  cluster.run(8)
  count = len(cluster.records)
  del cluster.next[1]
  cluster.run(20)
  assert count > 2 and len(cluster.records) <= count + 1  # below the quorum nothing is merged
  assert cluster.learners[0].n == 28  # and nobody waits


def test_a_joiner_starts_from_the_global_parameters_and_counts(x64):
  cluster = Cluster(options(**ASYNC))
  cluster.run(12.5)
  number = cluster.add(1.0)
  core = cluster.learners[number]
  assert number == 3 and core.n == 12  # the learning rate's schedule continues where its peers are
  assert difference(core.w, cluster.theta()) == 0
  assert int(optax.tree_utils.tree_get(core.opt, "count", filtering=lambda path, _: "Schedule" in str(path))) == 12
  cluster.run(10)
  assert steps_by(cluster, 3)[-1] == cluster.records[-1]["step"]


def test_a_learner_with_nan_is_left_out_reported_and_seeded_again(x64):
  cluster = Cluster(options(**ASYNC))
  cluster.run(10)
  core = cluster.learners[1]
  core.w = jax.tree.map(lambda x: x * jnp.nan, core.w)
  cluster.run(10)
  events = [(e["event"], e["actor"]) for e in cluster.syncers[0].events]
  assert events[-2:] == [("non_finite", "learner 1"), ("reseeded", "learner 1")]
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((core.w, cluster.theta())))
  assert steps_by(cluster, 1)[-1] == cluster.records[-1]["step"]
  assert ["reseed"] == [op[0] for op in core.ops + [o for r in cluster.records for c in r["contributions"]
                                                    for o in c["ops"] if c["learner"] == 1] if op[0] == "reseed"]


def test_a_learner_that_must_wait_does_not_run_past_its_contribution(x64):
  core = Cluster(options(**{**ASYNC, "overlap": 0, "quorum": 3})).learners[0]
  for n in range(4):
    assert not core.waiting() and core.n == n
    core.step(batch(0, n))
  assert core.waiting() and core.offers() == []  # it has heard of no step yet, as after a resume
  core.receive(Opened(0, 0, 1, False, 1))
  assert not core.waiting() and len(core.offers()) == 1 and core.waiting()
  never = Cluster(options(**ASYNC)).learners[0]
  for n in range(6):
    never.step(batch(0, n))
    assert not never.waiting()


def test_counters_follow_the_spec(x64):
  o = options(**ASYNC)
  cluster = Cluster(o, speeds=[1.0])
  core = cluster.learners[0]
  for _ in range(3):
    core.step(batch(0, core.n))
  assert core.steps == dict.fromkeys(range(4), 3) and core.tokens == dict.fromkeys(range(4), 3 * 8)
  core.receive(Arrived(2, 3, cluster.fetch(0, 2)[1]))
  assert (core.steps[2], core.tokens[2]) == (0, 0) and core.steps[1] == 3 and core.version[2] == 3
  core.receive(Arrived(2, 3, cluster.fetch(0, 2)[1]))  # the same again changes nothing
  assert [op[0] for op in core.ops] == ["join", "apply"]


def test_blend_keeps_alpha_of_the_local_value(x64):
  for alpha in (0.0, 0.25, 1.0):
    cluster = Cluster(options(**{**ASYNC, "blend": alpha}), speeds=[1.0])
    core = cluster.learners[0]
    core.step(batch(0, 0))
    local = {k: np.asarray(x) for k, x in core.programs.fragments.take(core.w, 1).items()}
    arrived = {k: np.asarray(x) + 2.0 for k, x in local.items()}
    core.receive(Arrived(1, 2, arrived))
    for k, x in core.programs.fragments.take(core.w, 1).items():
      np.testing.assert_allclose(x, alpha * local[k] + (1 - alpha) * arrived[k], atol=1e-15)


# --- the syncer's memory --------------------------------------------------------------------------------------------


def test_a_syncer_that_is_killed_continues_from_its_last_step(x64, tmp_path):
  o = options(**ASYNC, outer_lr=0.7, outer_momentum=0.9, codec="topk")
  clusters = [Cluster(o), Cluster(o)]
  for kill, cluster in enumerate(clusters):
    store = Store(str(tmp_path / str(kill)))
    core = cluster.syncers[0]
    for _ in range(12):
      done = len(cluster.records)
      cluster.run(1.0)
      for record in cluster.records[done:]:
        store.append(record)
        facts = core.facts()
        store.save(record["fragment"], core.theta[record["fragment"]], core.outer[record["fragment"]], facts)
    if kill:
      store.append({**cluster.records[-1], "step": core.t})  # the tape may be one line ahead
      fresh = SyncerCore(o, cluster.merger, {}, cluster.params)
      store.append({"event": "started", "syncer_step": core.t})
      store.load(fresh, cluster.now)
      assert fresh.epoch == 1 and fresh.t == core.t and fresh.version == core.version
      assert [x["step"] for x in read_tape(str(tmp_path / "1" / "tape.jsonl")) if "step" in x] == [
          r["step"] for r in cluster.records]
      assert fresh.facts() == facts and {m: x.taped for m, x in fresh.members.items()} == {
          m: x.taped for m, x in core.members.items()}
      for a, b in zip(jax.tree.leaves((fresh.theta, fresh.outer)), jax.tree.leaves((core.theta, core.outer))):
        np.testing.assert_array_equal(a, b)
      cluster.syncers[0] = fresh
    cluster.run(8)
  # Contributions that were lost with the syncer came again, errors fed back once: the same run.
  assert difference(clusters[0].theta(), clusters[1].theta()) == 0


def test_a_lost_contribution_is_sent_again_and_a_late_one_is_refused(x64):
  cluster = Cluster(options(**{**ASYNC, "quorum": 3}))
  core, syncer = cluster.learners[0], cluster.syncers[0]
  for _ in range(4):
    core.step(batch(0, core.n))
  core.receive(Opened(0, 0, 1, False, 1))
  first, = core.offers()
  assert first.full and core.offers() == []
  core.receive(Opened(0, 1, 1, False, 1))  # the syncer has started again
  again, = core.offers()
  assert (again.t, again.n, again.full) == (1, 4, True)
  for k, x in first.payload.items():
    np.testing.assert_array_equal(x, again.payload[k])
  assert [op[0] for op in core.ops] == ["join", "offer", "retract", "offer"]
  send = lambda c: syncer.offer(Contribution(**{**vars(c), "payload": jax.device_get(c.payload)}), 1.0)
  syncer.epoch = 1
  assert send(first) == "late"  # it was under way while the syncer started again
  assert send(again) == "taken" and send(again) == "taken"  # the first answer was lost
  assert [(c.seq, c.n) for c in syncer._in.values()] == [(again.seq, 4)]
  again.t = 7
  assert send(again) == "late"
  again.life = 9
  assert send(again) == "life"


@pytest.mark.parametrize("policy", ["decoupled", "sync"])
def test_a_learner_continues_from_its_snapshot_bit_for_bit(x64, policy):
  o = options(**{**ASYNC, "codec": "topk", "blend": 0.5, "quorum": 3, "overlap": 0 if policy == "sync" else 2})
  cluster = Cluster(o)
  cluster.run(13)
  saved = {m: core.snapshot(1) for m, core in cluster.learners.items()}
  facts, memory = cluster.syncers[0].facts(), (dict(cluster.syncers[0].theta), dict(cluster.syncers[0].outer))
  resumed = Cluster(o)
  resumed.now = cluster.now
  resumed.syncers[0].recall(facts, *memory, 1, resumed.now)
  for m, state in saved.items():
    state["facts"]["merged"] = [facts["members"][str(m)]["taped"]]
    life, n = resumed.syncers[0].join(m, {}, resumed.now)
    resumed.learners[m] = LearnerCore(resumed.programs, m, life, n, resumed.everything(), state)
    resumed.next[m] = cluster.next[m]
    assert (life, resumed.learners[m].n) == (2, cluster.learners[m].n)
  for one in (cluster, resumed):
    one.run(12)
  assert difference(cluster.theta(), resumed.theta()) == 0
  assert difference(cluster.learners[1].w, resumed.learners[1].w) == 0


def test_a_run_with_failures_replays_bit_for_bit_from_its_tape(x64):
  o = options(**{**ASYNC, "codec": "int8", "error_feedback": True, "blend": 0.3, "fragments": 4, "syncers": 2})
  cluster = Cluster(o, speeds=[1.0, 1.3, 2.9])
  cluster.run(9)
  cluster.add(0.8)
  cluster.run(5)
  cluster.learners[1].w = jax.tree.map(lambda x: x * jnp.nan, cluster.learners[1].w)
  cluster.run(6)
  cluster.add(1.0, 0)  # learner 0 dies and joins again
  cluster.run(10)
  assert len({c["learner"] for r in cluster.records for c in r["contributions"]}) == 4
  player = Replay(cluster.programs, cluster.merger, cluster.params, lambda m: {n: batch(m, n) for n in range(60)},
                  cluster.records)
  compared = player.play()
  assert len(compared) == len(cluster.records) > 12 and all(same for _, same in compared)
  assert difference(cluster.programs.assemble(player.theta), cluster.theta()) == 0
  broken = [dict(r) for r in cluster.records]
  broken[7] = {**broken[7], "checksum": 1}
  compared = Replay(cluster.programs, cluster.merger, cluster.params, lambda m: {n: batch(m, n) for n in range(60)},
                    broken).play()
  assert [t for t, same in compared if not same] == [broken[7]["step"]]


# --- merges on arrival ----------------------------------------------------------------------------------------------


def test_delayed_nesterov_is_its_pseudocode(x64):
  lr, beta, arrivals, c = 0.3, 0.8, 3, 0.1
  gradients = np.random.default_rng(0).normal(size=(8, 2))
  theta, total, m = np.zeros(2), np.zeros(2), np.zeros(2)
  opt = delayed_nesterov(lr, beta, arrivals, c)
  w, state = jnp.zeros(2), opt.init(jnp.zeros(2))
  for t, g in enumerate(gradients):
    total = total + g
    if (t + 1) % arrivals == 0:
      m = beta * m + total / arrivals
      theta = theta - lr * ((1 - c * arrivals + c) * beta * m + g / arrivals)
      total = np.zeros(2)
    else:
      theta = theta - lr * (c * beta * m + g / arrivals)
    updates, state = opt.update(jnp.asarray(g), state)
    w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(w, theta, atol=1e-15)
  one, nesterov = delayed_nesterov(lr, beta, 1), optax.sgd(lr, momentum=beta, nesterov=True)
  a, b = one.init(w), nesterov.init(w)
  for g in gradients:
    (x, a), (y, b) = one.update(jnp.asarray(g), a), nesterov.update(jnp.asarray(g), b)
    np.testing.assert_allclose(x, y, atol=1e-15)
  with pytest.raises(ValueError, match="share=0.5"):
    delayed_nesterov(lr, beta, 3, 0.5)


def test_merges_on_arrival_are_the_servers_pseudocode(x64):
  """Each learner trains H_i steps from what its last contribution made; the server adds g/M on arrival (10.10)."""
  o = options(policy="async_mean", learners=2, quorum=1, inner_steps=10, fragments=1, overlap=2,
              outer=optax.sgd(1.0 / 2))
  speeds = [1.0, 1.5]
  cluster = Cluster(o, speeds=speeds)
  cluster.run(60)
  assert all(len(r["contributions"]) == 1 for r in cluster.records)
  # DyLU: H_i = max(floor(H v_i / v_max), 5); the first phase is H for everyone.
  gaps = {m: np.diff([0, *(c["n"] for r in cluster.records for c in r["contributions"] if c["learner"] == m)])
          for m in (0, 1)}
  assert set(gaps[0]) == {10} and gaps[1][0] == 10 and set(gaps[1][1:]) == {6}
  theta, local = start(), {m: (start(), INNER.init(start()), 0) for m in (0, 1)}
  grad, update = jax.jit(jax.grad(lambda w, b: loss(w, b, None))), jax.jit(INNER.update)
  for r in cluster.records:
    m, n = r["contributions"][0]["learner"], r["contributions"][0]["n"]
    begin, opt, done = local[m]
    w = begin
    for k in range(done, n):
      updates, opt = update(grad(w, batch(m, k)), opt, w)
      w = optax.apply_updates(w, updates)
    theta = jax.tree.map(lambda t, b, e: t - 0.5 * (b - e), theta, begin, w)
    local[m] = (theta, opt, n)
  assert difference(cluster.theta(), theta) < 1e-12


# --- data, configs --------------------------------------------------------------------------------------------------


def test_a_learners_batches_are_those_of_the_spmd_path():
  train = [np.full(5, i) for i in range(23)]
  rounds = data.round_batches(train, workers=3, inner_steps=2, batch_size=2, seed=7)
  for m in range(3):
    mine = data.worker_batches(train, m, 3, 2, 7)
    for n in range(20):
      np.testing.assert_array_equal(mine[n]["tokens"], rounds[n // 2]["tokens"][m, n % 2])
  late = {int(i) for n in range(3) for i in data.worker_batches(train, 4, 3, 2, 7)[n]["tokens"][:, 0]}
  assert late <= set(range(1, 23, 3))  # the share of worker 1
  with pytest.raises(ValueError, match="batch_size=9"):
    data.worker_batches(train, 0, 3, 9, 7)


def test_the_quickstart_is_possible():
  path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs", "decoupled_quickstart.py")
  config = config_flags.config_flags._ConfigFileParser(name="config").parse(path)
  o = check(config)
  assert (o.learners, o.quorum, o.fragments, o.interval, o.overlap, o.outer.lr_and_momentum) == (4, 1, 12, 2, 2, (0.7, 0.5))
  # A learner takes H steps to its first fragment, and H/P to each of the next ones: the schedule's length.
  s = schedule_config(config)
  assert s.rounds * s.inner_steps == 24 * 240 / 12


@pytest.mark.parametrize("arg, words", [
    ("learners=0", ["learners=0"]), ("quorum=5", ["quorum=5", "learners=4", "lower it"]), ("steps=0", ["steps=0"]),
    ("decoupled.fragments=3", ["decoupled.fragments=3", "inner_steps=20"]),
    ("decoupled.syncers=3", ["decoupled.syncers=3", "decoupled.fragments=20"]),
    ("decoupled.policy=async", ["async", "delayed_nesterov"]), ("decoupled.merge=average", ["average", "rda"]),
    ("decoupled.codec=zip", ["zip", "int8"]), ("decoupled.blend=2", ["decoupled.blend=2"]),
    ("decoupled.grace=1", ["decoupled.grace=1"]), ("decoupled.silent_after=0", ["decoupled.silent_after"]),
    ("decoupled.pace=-1", ["decoupled.pace=-1"]), ("decoupled.resources=GPU", ["decoupled.resources", "GPU=1"]),
    ("decoupled.outer_lr=-1", ["outer_lr=-1"]), ("method=diloco,method.outer_lr=0.3", ["method.outer_lr=0.3", "decoupled"]),
    ("decoupled.policy=async_mean,quorum=2", ["async_mean", "quorum"]), ("worker_weights=1;1;1;1", ["worker_weights"]),
    ("inner.lr=0", ["inner.lr=0"]), ("mesh.fsdp=3", ["mesh.fsdp=3"]),
])
def test_impossible_configs_are_refused_in_a_sentence(arg, words):
  with pytest.raises(ValueError) as e:
    check(get_config(arg))
  assert all(w in str(e.value) for w in words), str(e.value)
  assert "\n" not in str(e.value)


def test_a_learner_without_an_accelerator_is_refused_where_one_is_wanted():
  config = get_config("allow_cpu=false")
  with pytest.raises(ValueError, match="allow_cpu=False.*decoupled.resources"):
    make_programs(config, check(config), 256)


def test_a_learner_with_another_config_is_refused():
  ours = fingerprint(get_config())
  refuse_mismatch(ours, fingerprint(get_config("learners=9,quorum=3,decoupled.pace=1,checkpoint_every=7")), "A learner")
  with pytest.raises(ValueError, match="Learner 3 has model.dim=64, but the run has 128"):
    refuse_mismatch(ours, fingerprint(get_config("model.dim=64")), "Learner 3")
  cluster = Cluster(options())
  cluster.syncers[0].keys = ours
  with pytest.raises(ValueError, match="decoupled.merge='mean'"):
    cluster.syncers[0].join(2, fingerprint(get_config("decoupled.merge=mean")), 0.0)


def test_a_learner_on_a_mesh_of_its_own_has_the_same_numbers(x64):
  o = options(**{**ASYNC, "learners": 1, "blend": 0.5})
  mesh = sharding.make_mesh(jax.devices()[:2], 1, 2, 1)
  rules = (("layers_0/mlp/kernel", PartitionSpec(None, "fsdp")), ("layers_1/mlp/kernel", PartitionSpec("fsdp")))
  thetas = []
  for place in ({}, {"mesh": mesh, "param_sharding": rules}):
    cluster = Cluster(o)
    if place:
      cluster.programs = Programs(o, jax.eval_shape(start), loss, INNER, **place)
      cluster.learners[0] = LearnerCore(cluster.programs, 0, 1, 0, cluster.everything())
    cluster.run(8)
    assert len(cluster.records) == 4
    thetas.append(cluster.theta())
  core = cluster.learners[0]
  halves = [core.w["layers_1"]["mlp"]["kernel"], core.opt[0].mu["layers_0"]["mlp"]["kernel"]]
  assert [{shard.data.shape for shard in x.addressable_shards} for x in halves] == [{(2, 2)}, {(3, 2)}]
  assert difference(*thetas) < 1e-12


def test_simulated_faults_are_refused():
  with pytest.raises(ValueError, match="faults.drop=0.1 has no effect on decoupled learners"):
    check(get_config("learners=2,quorum=1,faults.drop=0.1"))
