"""Resume: from every round boundary, on every method, bit for bit; broken and foreign checkpoints are refused."""

import os
import shutil

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fgd_jax as fgd
from fgd_jax.checkpoint import Checkpoints
from fgd_jax.default_config import get_config

M, H = 4, 2
# Every method, and states of their own: fragments in flight over the end of a round, earlier outer gradients, errors.
OPTIONS = {"streaming_diloco": {"fragments": 2, "order": "flat", "delay": 1}, "pipelined_diloco": {"fragments": 2},
           "eager_diloco": {"delay": 2}, "isoloco": {"aggregator_options": {"exclude": "embed"}}}
VARIANTS = {"diloco, topk": ("diloco", {"codec": "topk"}), "GlobalM1, int4": ("GlobalM1", {"codec": "int4"}),
            "GlobalM1, recovered": ("GlobalM1", {"momentum": "recovered"}),
            "diloco, dare": ("diloco", {"aggregator": "dare"}),
            "streaming, schedule": ("streaming_diloco", {"fragments": 1, "outer_lr": optax.linear_schedule(0.7, 0.1, 3)}),
            "pipelined, e3m0": ("pipelined_diloco", {"fragments": 1, "guess": "own", "error_feedback": True,
                                                     "codec": ("e3m0", {"stochastic": True})})}
METHODS = [name for name in [*fgd.methods.METHODS, *fgd.methods.PRESETS, *VARIANTS] if name != "fgd"]
PARAMS = {"embed": jnp.full((4, 3), 0.3), "layers_0": {"b": jnp.arange(3.0)}, "layers_1": {"b": jnp.ones((3, 1))}}


def loss(params, batch, rng):
  hidden = jnp.tanh(batch @ params["embed"] + params["layers_0"]["b"])
  return jnp.mean((hidden @ params["layers_1"]["b"] - 1 + 0.1 * jax.random.normal(rng, (5, 1))) ** 2)


def build(name, mesh_size=None, **options):
  mesh = None if mesh_size is None else jax.make_mesh((mesh_size,), ("worker",))
  base, fixed = VARIANTS.get(name, (name, OPTIONS.get(name, {})))
  method = fgd.methods.make(base, **{**fixed, **options})
  return fgd.build_round(method, loss, optax.adamw(1e-2), workers=fgd.Workers(M, mesh))


def batch_iterator():
  """Round r's batches as a pure function of r, through grain."""
  make = lambda r: np.random.default_rng(r).normal(size=(M, H, 5, 4)).astype(np.float32)
  return iter(grain.MapDataset.range(100).map(make).to_iter_dataset(grain.ReadOptions(num_threads=1)))


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name, mesh_size", [
    *((name, None) for name in METHODS), ("GlobalM1LocalM2", 2), ("streaming_diloco", 2), ("diloco, topk", 2)])
def test_resume_from_every_round_boundary_is_bitwise(name, mesh_size, tmp_path):
  rounds = 4
  init, round_fn = build(name, mesh_size)
  state, data = init(PARAMS), batch_iterator()
  checkpoints = Checkpoints(str(tmp_path / "c"), rounds + 1, get_config())
  for _ in range(rounds):
    checkpoints.save(state, data)  # and the next round donates the state at once, while the save may be in flight
    state, metrics = round_fn(state, next(data))
  checkpoints.close()
  for r in range(rounds):
    folder = tmp_path / f"from_{r}"
    shutil.copytree(tmp_path / "c", folder)
    for later in range(r + 1, rounds):
      shutil.rmtree(folder / str(later))
    reader = Checkpoints(str(folder), rounds + 1, get_config())
    again = batch_iterator()
    resumed = reader.restore(round_fn.abstract_state(PARAMS), again)
    assert resumed.round == r and isinstance(resumed.round, np.int32)
    while resumed.round < rounds:
      resumed, resumed_metrics = round_fn(resumed, next(again))
    assert_same(resumed, state)
    np.testing.assert_array_equal(resumed_metrics["loss"], metrics["loss"])
    reader.close()


def test_saved_state_is_the_one_before_donation(tmp_path):
  init, round_fn = build("diloco")
  state, data = init(PARAMS), batch_iterator()
  state, _ = round_fn(state, next(data))
  copy = jax.tree.map(lambda x: np.array(x), state)
  checkpoints = Checkpoints(str(tmp_path / "c"), 2, get_config())
  checkpoints.save(state, data)
  for _ in range(3):
    state, _ = round_fn(state, next(data))
  checkpoints.close()
  reader = Checkpoints(str(tmp_path / "c"), 2, get_config())
  assert_same(jax.tree.map(np.array, reader.restore(round_fn.abstract_state(PARAMS), batch_iterator())), copy)
  reader.close()


def test_restore_on_another_number_of_devices(tmp_path):
  init, round_fn = build("LocalM1M2", 4)
  state, _ = round_fn(init(PARAMS), np.ones((M, H, 5, 4), np.float32))
  checkpoints = Checkpoints(str(tmp_path / "c"), 2, get_config())
  checkpoints.save(state, batch_iterator())
  checkpoints.close()
  for devices in (None, 1, 2, 4):
    _, other = build("LocalM1M2", devices)
    reader = Checkpoints(str(tmp_path / "c"), 2, get_config())
    restored = reader.restore(other.abstract_state(PARAMS), batch_iterator())
    assert_same(restored, state)
    assert restored.params["embed"].sharding.num_devices == (devices or 1)
    other(restored, np.ones((M, H, 5, 4), np.float32))  # and it can go on there
    reader.close()


def test_half_written_step_is_skipped_and_kept(tmp_path):
  init, round_fn = build("diloco")
  state, data = init(PARAMS), batch_iterator()
  checkpoints = Checkpoints(str(tmp_path / "c"), 3, get_config())
  for _ in range(2):
    state, _ = round_fn(state, next(data))
    checkpoints.save(state, data)
  checkpoints.close()
  os.rename(tmp_path / "c" / "2", tmp_path / "c" / "2.orbax-checkpoint-tmp")
  reader = Checkpoints(str(tmp_path / "c"), 3, get_config())
  assert reader.latest() == 1
  assert reader.restore(round_fn.abstract_state(PARAMS), batch_iterator()).round == 1
  reader.close()


@pytest.mark.parametrize("damage", ["state", "data", "config", "bytes"])
def test_corrupt_checkpoint_gets_one_sentence(damage, tmp_path):
  init, round_fn = build("diloco")
  checkpoints = Checkpoints(str(tmp_path / "c"), 2, get_config())
  checkpoints.save(round_fn(init(PARAMS), np.ones((M, H, 5, 4), np.float32))[0], batch_iterator())
  checkpoints.close()
  if damage == "bytes":
    for folder, _, files in os.walk(tmp_path / "c" / "1" / "state"):
      for file in files:
        open(os.path.join(folder, file), "wb").close()
  else:
    shutil.rmtree(tmp_path / "c" / "1" / damage)
  reader = Checkpoints(str(tmp_path / "c"), 2, get_config())
  with pytest.raises(ValueError, match=r"c/1 cannot be read .* Move it away") as e:
    reader.restore(round_fn.abstract_state(PARAMS), batch_iterator())
  assert "\n" not in str(e.value)
  reader.close()


def test_other_config_is_refused_with_its_key(tmp_path):
  init, round_fn = build("diloco")
  checkpoints = Checkpoints(str(tmp_path / "c"), 2, get_config())
  checkpoints.save(init(PARAMS), batch_iterator())
  checkpoints.close()
  reader = Checkpoints(str(tmp_path / "c"), 2, get_config("inner.lr=0.5"))
  with pytest.raises(ValueError, match=r"inner.lr=0.5 contradicts .*0.003"):
    reader.restore(round_fn.abstract_state(PARAMS), batch_iterator())
  reader.close()
  reader = Checkpoints(str(tmp_path / "c"), 2, get_config("checkpoint_every=7"))  # computes the same: allowed
  assert reader.restore(round_fn.abstract_state(PARAMS), batch_iterator()).round == 0
  reader.close()


def test_failed_save_is_reported(tmp_path, monkeypatch):
  init, round_fn = build("diloco")
  (tmp_path / "file").write_text("not a folder")
  with pytest.raises((OSError, ValueError)):
    Checkpoints(str(tmp_path / "file" / "c"), 2, get_config())
