"""Configs: every key in one place, variants, and one clear sentence for what cannot work."""

import glob
import os
import pickle

import jax
import numpy as np
import optax
import pytest
from ml_collections import config_flags

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import models
from fgd_jax.default_config import get_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG_FILES = sorted(glob.glob(os.path.join(ROOT, "configs", "**", "*.py"), recursive=True))


def load(path):
  """A config file as the command line loads it."""
  return config_flags.config_flags._ConfigFileParser(name="config").parse(path)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=[os.path.relpath(p, ROOT) for p in CONFIG_FILES])
def test_every_config_file_is_valid_and_takes_variants(path):
  configs.validate(load(path))
  varied = load(f"{path}:workers=8,method=LocalM1M2,inner.lr=1e-4,model.tied=true")
  configs.validate(varied)
  assert (varied.workers, varied.method.name, varied.inner.lr, varied.model.tied) == (8, "LocalM1M2", 1e-4, True)


def test_another_method_starts_from_its_own_defaults():
  c = load(os.path.join(ROOT, "configs", "quickstart.py:method=data_parallel"))
  configs.validate(c)
  assert c.method.outer_lr is None
  assert load(os.path.join(ROOT, "configs", "quickstart.py:method=diloco,method.outer_lr=0.3")).method.outer_lr == 0.3


def test_every_key_of_the_default_config_has_a_comment():
  lines = [line for line in open(os.path.join(ROOT, "configs", "default.py")) if line.strip().startswith("c.")]
  keys = [line for line in lines if " = " in line and "ConfigDict()" not in line]
  assert len(keys) == len(configs.flat(get_config()))
  plain = {"c.model.layers", "c.model.heads", "c.inner.b1", "c.inner.b2", "c.method.outer_lr", "c.method.outer_momentum"}
  for line in keys:
    assert "#" in line or line.split("=")[0].strip() in plain, line


def test_placeholders_take_values_of_their_type_only():
  c = get_config()
  c.method.outer_lr = 0.5
  c.cpu_devices = 2
  with pytest.raises(TypeError):
    c.method.outer_lr = "fast"
  with pytest.raises(AttributeError, match="outer_lrr"):
    c.method.outer_lrr = 0.5


@pytest.mark.parametrize("arg, words", [
    ("worker=8", ["worker", "workers"]),
    ("workers=eight", ["workers", "eight"]),
    ("workers", ["key=value"]),
    ("model.tied=maybe", ["model.tied", "true or false"]),
])
def test_bad_variants_are_named(arg, words):
  with pytest.raises(ValueError) as e:
    get_config(arg)
  assert all(w in str(e.value) for w in words)


@pytest.mark.parametrize("arg, words", [
    ("rounds=0", ["rounds=0"]),
    ("inner_steps=0", ["inner_steps=0"]),
    ("workers=0", ["workers=0"]),
    ("accumulate=3", ["accumulate=3", "batch_size=4"]),
    ("mesh.worker=3", ["mesh.worker=3", "workers=4"]),
    ("eval_every=-1", ["eval_every=-1"]),
    ("inner.schedule=linear", ["inner.schedule", "linear"]),
    ("inner.lr=0", ["inner.lr=0"]),
    ("model.param_dtype=float64", ["float64", "JAX_ENABLE_X64"]),
    ("method=DiLoco", ["DiLoco", "diloco"]),
    ("method=diloco,method.mix1=ring", ["diloco", "mix1"]),
    ("method=fgd,method.mix1=rings", ["rings"]),
    ("method=fgd,method.mix1=hypercube,workers=6", ["hypercube", "workers=6"]),
    ("method=fgd,method.mix2=torus", ["torus", "workers=4"]),
    ("method=fgd,method.mix1=random_groups:group_size=3", ["group_size=3", "workers=4"]),
    ("method.outer_momentum=1.0", ["outer_momentum=1.0"]),
    ("method.outer_lr=-1", ["outer_lr=-1.0"]),
    ("method.outer_schedule=cosin", ["outer_schedule='cosin'", "'cosine'"]),
    ("method.outer_schedule=cosine:end=2", ["cosine:end=2", "from 0 to 1"]),
    ("method.outer_schedule=cosine:end=low", ["cosine:end=low", "from 0 to 1"]),
    ("method.outer_schedule=cosine:start=1", ["cosine:start=1", "end"]),
    ("method.outer_schedule=constant:end=0", ["constant:end=0", "latter two"]),
    ("method.outer_schedule=cosine:end=true", ["cosine:end=true", "from 0 to 1"]),
    ("method=GlobalM1,method.subset=^embed/", ["subset='^embed/'", "no effect", "mix2='identity'"]),
    ("rounds=5,method.outer_warmup_rounds=5", ["outer_warmup_rounds=5", "rounds=5"]),
    ("method=noloco,method.outer_schedule=cosine", ["outer_schedule", "'noloco'"]),
    ("method=GlobalM1,method.momentum=recovered,method.outer_schedule=cosine", ["recovered", "schedule"]),
    ("mesh.worker=0", ["mesh.worker=0"]),
    ("mesh.fsdp=3", ["mesh.fsdp=3", "batch_size=4"]),
    ("inner.lr=nan", ["inner.lr", "finite"]),
    ("inner.b1=1.5", ["inner.b1=1.5"]),
    ("measure_sequences=1000", ["measure_sequences=1000", "64"]),
    ("rounds=2000000000,inner_steps=20", ["rounds", "overflow"]),
])
def test_impossible_values_stop_with_one_sentence(arg, words):
  with pytest.raises(ValueError) as e:
    configs.validate(get_config(arg))
  assert all(w in str(e.value) for w in words), str(e.value)
  assert "\n" not in str(e.value)


def test_unknown_and_missing_keys_are_named():
  c = get_config()
  with c.unlocked():
    c.inner.learning_rate = 1.0
  with pytest.raises(ValueError, match="inner.learning_rate"):
    configs.validate(c)
  c = get_config()
  with c.unlocked():
    del c.inner["clip"]
  with pytest.raises(ValueError, match="inner.clip"):
    configs.validate(c)


def test_topology_options_reach_the_mixer():
  c = get_config("workers=8,method=fgd,method.mix2=random_groups:group_size=2,method.mix1=ring")
  bound = configs.make_method(c).bind(8, 0)
  assert bound.mix2.contraction() == pytest.approx(3 / 7)  # (M-k)/(k(M-1))
  assert bound.mix1.topology.name == "ring"


def test_learning_rate_runs_over_the_whole_run():
  schedule = configs.make_schedule(get_config("rounds=10,inner_steps=10,inner.lr=1.0,inner.warmup_steps=9"))
  assert float(schedule(0)) == pytest.approx(0.1)  # the first step of a 9-step warm-up to 1 is not 0
  assert float(schedule(9)) == pytest.approx(1.0)
  assert float(schedule(100)) == pytest.approx(0.1)  # end_lr_fraction
  constant = configs.make_schedule(get_config("inner.schedule=constant,inner.warmup_steps=0,inner.lr=0.5"))
  assert float(constant(0)) == float(constant(10**6)) == 0.5


def test_outer_learning_rate_runs_over_the_rounds():
  def lr(words, r):
    method = configs.make_method(get_config(f"rounds=10,method=diloco,{words}"))
    return float(method.outer_lr(r))

  cosine = "method.outer_lr=0.8,method.outer_schedule=cosine:end=0.25"
  for r, part in [(0, 1.0), (5, 0.5), (10, 0.0)]:
    assert lr(cosine, r) == pytest.approx(0.8 * (0.25 + 0.75 * part))
  assert lr("method.outer_schedule=linear", 5) == pytest.approx(0.35)  # half of diloco's default, 0.7
  warmed = "method.outer_lr=1.0,method.outer_schedule=linear,method.outer_warmup_rounds=4"
  for r, expected in [(0, 0.2), (2, 0.6), (4, 1.0), (7, 0.5), (10, 0.0)]:
    assert lr(warmed, r) == pytest.approx(expected, abs=1e-7)
  assert lr("method.outer_warmup_rounds=1", 0) == pytest.approx(0.35)
  assert lr("method.outer_warmup_rounds=1", 9) == pytest.approx(0.7)
  method = configs.make_method(get_config(f"method=diloco,{cosine}"))
  assert method == configs.make_method(get_config(f"method=diloco,{cosine}")) == pickle.loads(pickle.dumps(method))
  recovered = "method=GlobalM1,method.momentum=recovered,method.outer_schedule=constant,method.outer_warmup_rounds=0"
  assert configs.make_method(get_config(recovered)).outer_lr is None


def test_weight_decay_is_chosen_by_path_so_stacked_layers_decay_alike():
  c = get_config("inner.lr=0.1,inner.warmup_steps=0,inner.clip=0,inner.schedule=constant,inner.weight_decay=0.5")
  optimizer = configs.make_inner_optimizer(c)
  plain = models.make(models.LlamaConfig(vocab_size=8, dim=8, layers=2, heads=2, kv_heads=2, ffn_dim=8))
  params = plain.init(jax.random.key(0))
  stacked = models.stack_layers(params)
  step = lambda p: optax.apply_updates(p, optimizer.update(jax.tree.map(np.zeros_like, p), optimizer.init(p), p)[0])
  for a, b in zip(jax.tree.leaves(models.stack_layers(step(params))), jax.tree.leaves(step(stacked))):
    np.testing.assert_array_equal(a, b)
  after = step(params)
  np.testing.assert_array_equal(after["final_norm"]["scale"], params["final_norm"]["scale"])
  np.testing.assert_allclose(after["embed"]["embedding"], 0.95 * params["embed"]["embedding"], rtol=1e-6)


def test_mesh_fits_devices_or_says_so():
  assert configs.make_workers(get_config("workers=4")).placement.devices == 4
  assert configs.make_workers(get_config("workers=6")).placement.devices == 6
  assert configs.make_workers(get_config("workers=4,mesh.worker=2")).placement.slots == 2
  assert configs.make_workers(get_config("workers=4,mesh.fsdp=2")).mesh.shape == {"worker": 4, "fsdp": 2, "tensor": 1}
  with pytest.raises(ValueError, match="needs 16 devices and there are 8"):
    configs.make_workers(get_config("workers=4,mesh.worker=4,mesh.fsdp=4"))
  with pytest.raises(ValueError, match="allow_cpu"):
    configs.make_workers(get_config("allow_cpu=false"))


def test_llama_1p5b_is_the_published_shape():
  """1.498B parameters, of which embedding, head and two layers are 43.2 %: no allocation."""
  c = load(os.path.join(ROOT, "configs", "llama_1p5b.py"))
  model = models.make(configs.make_model_config(c, 128_256))
  params = jax.eval_shape(model.init, jax.random.key(0))
  layer = 2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192 + 2 * 2048
  total = 2 * 128_256 * 2048 + 16 * layer + 2048
  assert models.count_params(params) == total
  assert round(total / 1e9, 3) == 1.498
  covered = 2 * 128_256 * 2048 + 2 * layer
  assert round(100 * covered / total, 1) == 43.2
  _, round_fn = fgd.build_round(configs.make_method(c), model.loss, configs.make_inner_optimizer(c), workers=fgd.Workers(8))
  state = round_fn.abstract_state(params)
  overlapped, blocking = round_fn.traffic(state.params, {"tokens": jax.ShapeDtypeStruct((8, 100, 64, 2049), np.int32)})
  assert overlapped == 2 * 7 / 8 * total * 4
  assert blocking == covered * 4
