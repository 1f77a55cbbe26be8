"""Going on with another number of workers or another mesh: what workers start from, what they read, what is counted."""

import collections
import functools
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fgd_jax as fgd
from fgd_jax import checkpoint, data, resize
from fgd_jax import train as trainer
from fgd_jax.data.deal import _Deal, worker_orders
from fgd_jax.default_config import get_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
H = 2
PARAMS = {"embed": jnp.linspace(-1, 1, 12).reshape(4, 3), "layers_0": {"b": jnp.arange(3.0)},
          "layers_1": {"b": jnp.ones((3, 1))}}
OPTIONS = {"streaming_diloco": {"fragments": 2, "order": "flat", "delay": 1}, "pipelined_diloco": {"fragments": 2},
           "eager_diloco": {"delay": 2}, "isoloco": {"aggregator_options": {"exclude": "embed"}}}
VARIANTS = {"diloco, topk": ("diloco", {"codec": "topk"}), "GlobalM1, int4": ("GlobalM1", {"codec": "int4"}),
            "GlobalM1, recovered": ("GlobalM1", {"momentum": "recovered"}),
            "LocalM1M2, schedule": ("LocalM1M2", {"outer_lr": optax.linear_schedule(0.7, 0.1, 3)})}
METHODS = [name for name in [*fgd.methods.METHODS, "LocalM1M2", *VARIANTS] if name != "fgd"]


def loss(params, batch, rng):
  hidden = jnp.tanh(batch @ params["embed"].astype(jnp.float32) + params["layers_0"]["b"])
  return jnp.mean((hidden @ params["layers_1"]["b"] - 1) ** 2)


def build(name, workers, mesh_size=None):
  mesh = None if mesh_size is None else jax.make_mesh((mesh_size,), ("worker",), devices=jax.devices()[:mesh_size])
  base, options = VARIANTS.get(name, (name, OPTIONS.get(name, {})))
  return fgd.build_round(fgd.methods.make(base, **options), loss, optax.adamw(1e-2), workers=fgd.Workers(workers, mesh))


def batches(r, workers):
  return np.random.default_rng([r, workers]).normal(size=(workers, H, 5, 4)).astype(np.float32)


@functools.cache
def some_state(name, workers=4, bf16=False):
  """A state after three rounds as far as shapes go, its numbers at random, so that no part is zero or equal by chance."""
  params = {**PARAMS, "embed": PARAMS["embed"].astype(jnp.bfloat16)} if bf16 else PARAMS
  draw = np.random.default_rng(5)
  one = lambda x: (np.full(x.shape, 6, x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else
                   np.asarray(jnp.asarray(draw.uniform(0.1, 1, x.shape), x.dtype)))
  state = build(name, workers)[1].abstract_state(params)
  return fgd.State(*jax.tree.map(one, tuple(state[:3])), np.int32(3))


def by_rule(x, count, rule):
  """The rule in NumPy."""
  x = np.asarray(x)
  mean = x[0] if x.dtype.kind in "iu" else x.astype(np.float64).mean(axis=0)
  rows = [x[m] if rule == "first" and m < len(x) else mean for m in range(count)]
  return np.stack(rows)


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, rule", [(2, "mean"), (6, "first")])
@pytest.mark.parametrize("name", METHODS)
def test_every_leaf_follows_the_rule(name, count, rule):
  """Parameters, inner optimizer and the method's own state. Nobody is dropped, so the average model is what it was."""
  old, (_, round_fn) = some_state(name), build(name, count)
  new, fresh = resize.resize(jax.tree.map(jnp.asarray, old), round_fn, rule)
  assert not fresh and new.round == 3 and isinstance(new.round, np.int32)
  for x, y in zip(jax.tree.leaves(tuple(new[:3])), jax.tree.leaves(tuple(old[:3]))):
    assert x.dtype == y.dtype
    np.testing.assert_allclose(x, by_rule(y, count, rule), rtol=1e-6, atol=1e-7)
  for x, y in zip(jax.tree.leaves(new.params), jax.tree.leaves(old.params)):
    np.testing.assert_allclose(np.asarray(x, np.float64).mean(axis=0), y.astype(np.float64).mean(axis=0), atol=1e-6)
    if rule == "mean":
      assert np.ptp(x, axis=0).max() == 0  # bitwise equal
  if rule == "mean" and name in ("LocalM1M2", "streaming_diloco", "eager_diloco"):  # and the run goes on
    new, metrics = round_fn(new, batches(3, count))
    assert new.round == 4 and np.isfinite(metrics["loss"]).all()


@pytest.mark.parametrize("name", ["LocalM1M2", "eager_diloco", "gasloc"])
def test_the_first_go_on_as_they_were(name):
  old, (_, round_fn) = some_state(name), build(name, 2)
  new, fresh = resize.resize(jax.tree.map(jnp.asarray, old), round_fn, "first")
  assert not fresh
  for x, y in zip(jax.tree.leaves(tuple(new[:3])), jax.tree.leaves(tuple(old[:3]))):
    np.testing.assert_array_equal(x, y[:2])


@pytest.mark.parametrize("name", ["diloco", "data_parallel"])
def test_equal_workers_stay_bitwise_what_they_were(name):
  """The mean of equal numbers is that number, also of three, so shared outer parameters and momentum are kept exactly."""
  old = jax.tree.map(lambda x: np.broadcast_to(x[0], x.shape), some_state(name, 3)._replace(round=np.full(1, 3, np.int32)))
  _, round_fn = build(name, 5)
  new, _ = resize.resize(jax.tree.map(jnp.asarray, old._replace(round=np.int32(3))), round_fn)
  for x, y in zip(jax.tree.leaves(tuple(new[:3])), jax.tree.leaves(tuple(old[:3]))):
    np.testing.assert_array_equal(x, np.broadcast_to(y[0], x.shape))


@pytest.mark.parametrize("name, key", [("GlobalM1, recovered", "ybar"), ("GlobalM1, int4", "ref")])
def test_earlier_means_move_with_the_mean_when_workers_leave(name, key):
  """Momentum x - ybar, and what has to be sent, z - ref, must not contain the jump of the mean."""
  old, (_, round_fn) = some_state(name), build(name, 2)
  new, _ = resize.resize(jax.tree.map(jnp.asarray, old), round_fn, "first")
  for path in (("embed",), ("layers_0", "b")):
    pick = lambda tree: np.asarray(tree[path[0]] if len(path) == 1 else tree[path[0]][path[1]], np.float64)
    before = pick(old.params).mean(axis=0) - pick(old.method_state[key])[0]
    after = pick(new.params).mean(axis=0) - pick(new.method_state[key])[0]
    assert np.abs(pick(new.params).mean(axis=0) - pick(old.params).mean(axis=0)).max() > 1e-4  # it did jump
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_narrow_parameters_are_the_rounded_originals():
  old, (_, round_fn) = some_state("GlobalM1LocalM2", bf16=True), build("GlobalM1LocalM2", 2)
  new, fresh = resize.resize(jax.tree.map(jnp.asarray, old), round_fn)
  mean = np.asarray(old.method_state.params["embed"], np.float64).mean(axis=0)
  assert not fresh and new.params["embed"].dtype == jnp.bfloat16
  np.testing.assert_allclose(new.method_state.params["embed"][1], mean, atol=1e-6)
  np.testing.assert_array_equal(new.params["embed"], new.method_state.params["embed"].astype(jnp.bfloat16))
  round_fn(new, batches(3, 2))


def test_parts_that_are_new_start_at_the_mean_and_others_are_kept():
  """One worker has no Mix1, so no reference for its codec; going on with three again needs a new one."""
  old, (_, alone), (_, three) = some_state("GlobalM1, int4"), build("GlobalM1, int4", 1), build("GlobalM1, int4", 3)
  state, fresh = resize.resize(jax.tree.map(jnp.asarray, old), alone)
  assert not fresh and state.method_state["ref"] == ()
  for x, y in zip(jax.tree.leaves(state.method_state["outer"]), jax.tree.leaves(old.method_state["outer"])):
    np.testing.assert_allclose(x, by_rule(y, 1, "mean"), rtol=1e-6, atol=1e-7)
  state, _ = alone(state, batches(3, 1))
  momentum = jax.tree.map(np.array, state.method_state["outer"])
  state, fresh = resize.resize(state, three)
  assert sorted(fresh) == ["ref/embed", "ref/layers_0/b", "ref/layers_1/b"]
  np.testing.assert_array_equal(state.method_state["ref"]["embed"], state.params["embed"])
  for x, y in zip(jax.tree.leaves(state.method_state["outer"]), jax.tree.leaves(momentum)):
    np.testing.assert_array_equal(x, by_rule(y, 3, "mean"))
  three(state, batches(4, 3))


def test_other_optimizer_and_unknown_rule_are_refused():
  old = some_state("diloco")
  _, other = fgd.build_round(fgd.methods.make("diloco"), loss, optax.sgd(0.1, momentum=0.9), workers=fgd.Workers(2))
  with pytest.raises(ValueError, match="inner optimizer"):
    resize.resize(jax.tree.map(jnp.asarray, old), other)
  with pytest.raises(ValueError, match=r"resume.workers='last' must be one of 'mean', 'first'"):
    resize.resize(jax.tree.map(jnp.asarray, old), build("diloco", 2)[1], "last")


@pytest.mark.parametrize("before, after", [((4, 4), (3, 3)), ((3, None), (4, 2)), ((6, 3), (2, None))])
def test_checkpoint_of_another_number_on_another_mesh(before, after, tmp_path):
  """Orbax restores M workers where their number need not divide the devices; every placement gives the same state."""
  name = "streaming_diloco"
  init, round_fn = build(name, *before)
  state, _ = round_fn(init(PARAMS), batches(0, before[0]))
  on_host = jax.tree.map(np.array, state)
  saver = checkpoint.Checkpoints(str(tmp_path / "c"), 2, get_config())
  saver.save(state, iter(data.round_batches(np.zeros((99, 9), np.int32), 2, 1, 1, 0).to_iter_dataset()))
  saver.close()
  _, new_round = build(name, *after)
  workers = fgd.Workers(after[0], None if after[1] is None else jax.make_mesh(
      (after[1],), ("worker",), devices=jax.devices()[:after[1]]))
  as_saved = build(name, before[0])[1].abstract_state(PARAMS)
  reader = checkpoint.Checkpoints(str(tmp_path / "c"), 2, get_config())
  restored = reader.restore(resize.spread(as_saved, workers))
  reader.close()
  new, fresh = resize.resize(restored, new_round)
  assert not fresh and new.params["embed"].sharding.device_set == set(workers.devices)
  for x, y in zip(jax.tree.leaves(tuple(new[:3])), jax.tree.leaves(tuple(on_host[:3]))):
    np.testing.assert_allclose(x, by_rule(y, after[0], "mean"), rtol=1e-6, atol=1e-7)
  new_round(new, batches(1, after[0]))


# --- data ------------------------------------------------------------------------------------------------------------


def read(orders, examples):
  return np.array([order[i] for order in orders for i in range(examples)])


def test_without_a_change_the_order_is_the_plain_one():
  """Worker m: the sequences m, m + M, ... of every pass."""
  for m, order in enumerate(worker_orders(10, 3, 7)):
    own = list(range(m, 10, 3))
    for k in range(3):
      assert sorted(order[i] for i in range(k * len(own), (k + 1) * len(own))) == own


@given(st.integers(12, 30), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3),
       st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_no_sequence_is_read_twice_in_the_first_pass(sequences, earlier, workers, seed):
  seen = []
  for i, (count, examples) in enumerate(earlier):
    if len(seen) + count * examples > sequences - count:
      earlier = earlier[:i]
      break
    seen.extend(read(worker_orders(sequences, count, seed, earlier[:i]), examples))
  left = (sequences - len(seen)) // workers  # all shares of the rest have at least this
  orders = worker_orders(sequences, workers, seed, earlier)
  seen.extend(read(orders, left))
  assert len(set(seen)) == len(seen)
  if (sequences - len(seen)) == 0:
    assert sorted(seen) == list(range(sequences))
  np.testing.assert_array_equal(read(worker_orders(sequences, workers, seed, earlier), left), read(orders, left))  # pure


@pytest.mark.parametrize("sequences, deals", [(10, [(3, 23), (2, 0), (2, 12)]), (6, [(5, 10), (1, 2), (3, 1), (3, 11)]),
                                              (7, [(4, 15), (3, 1), (2, 2), (2, 10)])])
def test_no_sequence_is_read_twice_in_any_pass(sequences, deals):
  """Several changes close together, workers passes apart: every (pass, sequence) at most once, and none is left out."""
  deal, seen = _Deal(sequences, deals[0][0], 1, 0, 0, []), collections.Counter()
  for number, (workers, examples) in enumerate(deals, 1):
    for m in range(workers):
      seen.update((deal._place(m, i)[0], sequence) for i, sequence in enumerate(read([deal.order(m)], examples)))
    complete = min(deal._place(m, examples)[0] for m in range(workers))
    if number < len(deals):
      deal = deal.after(examples, deals[number][0], number)
  assert max(seen.values()) == 1
  assert all((k, sequence) in seen for k in range(complete) for sequence in range(sequences))


def test_passes_stay_whole_when_workers_had_drifted_apart():
  """10 sequences, 3 workers: shares of 4, 3, 3. After 23 reads each, two workers are two passes ahead of the third."""
  counts = np.bincount(read(worker_orders(10, 3, 1), 23), minlength=10)
  assert (counts.min(), counts.max()) == (5, 8)  # 23 // 4 and ceil(23 / 3)
  orders, finished = worker_orders(10, 2, 1, [(3, 23)]), {}
  for i in range(100):
    for order in orders:
      sequence = order[i]
      counts[sequence] += 1
      finished[counts.min()] = max(finished.get(counts.min(), 0), counts.max())
  # Eight passes had begun. While the slowest sequences catch up, the fast ones wait but for the share of one read.
  assert all(most <= 9 for least, most in finished.items() if least < 8), finished
  assert all(most <= least + 2 for least, most in finished.items() if least >= 8), finished


def test_batches_after_a_change_come_from_the_new_orders():
  tokens = np.arange(40)[:, None] * np.ones((1, 4), np.int32)
  rounds = data.round_batches(tokens, workers=2, inner_steps=3, batch_size=2, seed=5, earlier=[(4, 5)])
  orders = worker_orders(40, 2, 5, [(4, 5)])
  np.testing.assert_array_equal(rounds[1]["tokens"][..., 0].reshape(2, -1),
                                [[order[i] for i in range(6, 12)] for order in orders])


# --- the run ---------------------------------------------------------------------------------------------------------


TINY = ("rounds=2,inner_steps=2,workers=4,batch_size=2,seq_len=16,eval_every=0,eval_batches=2,eval_batch_size=4,"
        "measure_every=0,checkpoint_every=1,checkpoint_keep=9,inner.warmup_steps=2,inner.schedule=constant,model.dim=16,"
        "model.ffn_dim=24,model.layers=1,model.heads=2,model.kv_heads=1,data.source=synthetic,mesh.worker=1,method=diloco")


def records(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as f:
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in f]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
  """4 workers for 2 rounds, 3 on a mesh for two more, the last part twice; and which examples were read."""
  workdir, seen = str(tmp_path_factory.mktemp("resume") / "a"), []
  original = data.load

  def load(*args):
    corpus = original(*args)

    class Counted:
      def __len__(self):
        return 56

      def gather(self, ids):
        seen.append(ids)
        return corpus.train.gather(ids)

    return corpus._replace(train=Counted())

  patch = pytest.MonkeyPatch()
  patch.setattr(data, "load", load)
  trainer.train(get_config(TINY), workdir)
  three = get_config(TINY + ",workers=3,rounds=4,mesh.worker=3,resume.workers=first")
  trainer.train(three, workdir)
  first = records(workdir)
  os.remove(os.path.join(workdir, "summary.json"))
  for name in ("3", "4"):  # as if the machine had gone down in round 3
    shutil.rmtree(os.path.join(workdir, "checkpoints", name))
  trainer.train(three, workdir)
  patch.undo()
  return workdir, seen, first


def test_counters_go_on_over_changes(resumed):
  workdir, _, first = resumed
  rounds = records(workdir)
  assert [r["round"] for r in rounds] == [1, 2, 3, 4] and [r["step"] for r in rounds] == [2, 4, 6, 8]
  assert [r["tokens"] for r in rounds] == [2 * 2 * 16 * n for n in (4, 8, 11, 14)]
  assert rounds == first  # resumed again from the same checkpoint: the same numbers
  assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]


def test_no_example_is_read_twice_over_changes(resumed):
  """2 rounds x 4 workers and 2 x 3, of 4 examples each, are one pass of 56."""
  _, seen, _ = resumed
  rounds = {}
  for ids in seen:  # the iterator reads ahead, and rounds of the first start
    rounds.setdefault(len(ids), []).append(ids)
  read = np.concatenate([*rounds[16][:2], *rounds[12][:2]])
  assert sorted(read.tolist()) == list(range(56))


def test_progress_over_several_changes():
  config = lambda words: get_config("inner_steps=5,batch_size=2,seq_len=8," + words)
  saved = checkpoint.Progress.start(config("workers=4"))._replace(now=960)
  progress = saved.changed(3, config("workers=2")).changed(3, config("workers=3"))
  assert progress == checkpoint.Progress(3, 3, 960, 960, 10, ((4, 30), (2, 0)))


def test_describe_tells_what_is_there(resumed):
  workdir, _, _ = resumed
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  command = [sys.executable, "-m", "fgd_jax.checkpoint", "describe", workdir]
  run = lambda *options: subprocess.run([*command, *options], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
  out = json.loads(run("--json").stdout)
  assert out["round"] == 4 and out["rounds_saved"] == [1, 2, 3, 4] and out["workers"] == 3
  assert out["tokens"] == records(workdir)[-1]["tokens"] and out["progress"]["earlier"] == [[4, 8]]
  assert out["leaves"]["params/embed/embedding"] == {"shape": [3, 64, 16], "dtype": "float32", "bytes": 3 * 64 * 16 * 4}
  parameters = json.load(open(os.path.join(workdir, "summary.json")))["parameters"]
  assert out["parts"]["params"]["numbers"] == 3 * parameters
  text = run("--round=2", "--leaves")
  assert "round 2 of 2" in text.stdout and "4 workers" in text.stdout and "params/lm_head/kernel" in text.stdout
  assert text.stderr == ""


@pytest.mark.parametrize("folder, words", [(".", "no complete checkpoint"), ("missing", "is not a folder")])
def test_describe_refuses_in_one_sentence(folder, words, tmp_path):
  with pytest.raises(SystemExit, match=words):
    checkpoint.main(["describe", str(tmp_path / folder)])


def test_keys_that_depend_on_workers_change_with_them_alone():
  saved = trainer.configs.flat(get_config("method.name=gasloc,method.inner_steps=20;20;10;5"))
  fewer = get_config("method.name=gasloc,method.inner_steps=20;10,workers=2,mesh.worker=1,overlap.form=barrier")
  checkpoint.refuse_other_config(fewer, saved, "the run")
  with pytest.raises(checkpoint.ConfigMismatchError, match=r"method.inner_steps='20;20;20;5' contradicts"):
    checkpoint.refuse_other_config(get_config("method.name=gasloc,method.inner_steps=20;20;20;5"), saved, "the run")
  with pytest.raises(checkpoint.ConfigMismatchError, match="batch_size=2 contradicts"):
    checkpoint.refuse_other_config(get_config("workers=2,batch_size=2"), saved, "the run")


@pytest.mark.parametrize("words, may", [("inner.schedule=constant", True), ("", False),
                                        ("inner.schedule=constant,method.outer_schedule=cosine", False),
                                        ("inner.schedule=constant,method.outer_warmup_rounds=2", True)])
def test_more_rounds_where_no_learning_rate_depends_on_them(words, may):
  saved = trainer.configs.flat(get_config(f"method=diloco,rounds=20,{words}"))
  more = get_config(f"method=diloco,rounds=30,{words}")
  if may:
    return checkpoint.refuse_other_config(more, saved, "the run")
  with pytest.raises(checkpoint.ConfigMismatchError, match="rounds=30 contradicts"):
    checkpoint.refuse_other_config(more, saved, "the run")


def test_flat_configs_come_back():
  config = get_config("method=LocalM1M2,method.codec=int8,model.dim=64,worker_weights=3;1;1;1")
  assert trainer.configs.unflat(trainer.configs.flat(config)).to_dict() == config.to_dict()
  with pytest.raises(ValueError, match="Unknown config key 'model.dims'"):
    trainer.configs.unflat({"model.dims": 3})
