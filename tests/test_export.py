"""Export to Hugging Face's Llama layout and back, against an independent NumPy Llama (and transformers where installed)."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import export, models
from fgd_jax import train as trainer
from fgd_jax.checkpoint import Checkpoints
from fgd_jax.data import tokenizer
from fgd_jax.default_config import get_config
from fgd_jax.export import __main__ as command

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 11))
SHAPES = {"grouped": {}, "tied": {"tied": True}, "theta": {"rope_theta": 500.0, "norm_eps": 1e-3, "kv_heads": 4},
          "scanned": {"scan_layers": True}}


def llama(name="grouped"):
  options = {"vocab_size": 256, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, **SHAPES[name]}
  return models.make(models.LlamaConfig(**options))


@functools.cache
def trained(name="grouped"):
  """Random weights, large enough for logits of a few units."""
  model, draw = llama(name), np.random.default_rng(1)
  one = lambda x: draw.normal(size=x.shape, scale=0.3) if x.ndim > 1 else draw.uniform(0.5, 1.5, x.shape)
  params = jax.tree.map(lambda x: one(x).astype(np.float32), jax.eval_shape(model.init, jax.random.key(3)))
  return export.Trained(model.config, params, tokenizer.load("bytes"), 16, "a test"), model


# --- the Llama of transformers in float64 NumPy, written from its definition, by the names of its weights -------------


def numpy_llama(folder, tokens_BxL):
  with open(os.path.join(folder, "config.json")) as f:
    c = json.load(f)
  w = {k: v.astype(np.float64) for k, v in safetensors.numpy.load_file(os.path.join(folder, "model.safetensors")).items()}
  heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"]
  norm = lambda x, g: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c["rms_norm_eps"]) * g
  B, L = tokens_BxL.shape
  inverse = c["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
  angles = np.arange(L)[:, None] * np.concatenate([inverse, inverse])
  turn = lambda x: x * np.cos(angles)[:, None] + np.concatenate([-x[..., dim // 2:], x[..., :dim // 2]], -1) * np.sin(
      angles)[:, None]  # rotate_half
  x = w["model.embed_tokens.weight"][tokens_BxL]
  for i in range(c["num_hidden_layers"]):
    at = lambda name, i=i: w[f"model.layers.{i}.{name}.weight"]
    h = norm(x, at("input_layernorm"))
    q, k, v = (((h @ at(f"self_attn.{n}_proj").T).reshape(B, L, -1, dim)) for n in "qkv")
    q, k = turn(q), turn(k)
    k, v = np.repeat(k, heads // kv, axis=2), np.repeat(v, heads // kv, axis=2)  # repeat_kv
    scores = np.einsum("blhd,bshd->bhls", q, k) / np.sqrt(dim) + np.triu(np.full((L, L), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhls,bshd->blhd", weights / weights.sum(-1, keepdims=True), v).reshape(B, L, -1)
    x = x + out @ at("self_attn.o_proj").T
    h = norm(x, at("post_attention_layernorm"))
    gate = h @ at("mlp.gate_proj").T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
  head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
  return norm(x, w["model.norm.weight"]) @ head.T


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """An exported folder for each shape."""
  out = {}
  for name in SHAPES:
    out[name] = str(tmp_path_factory.mktemp("export") / name)
    export.write_folder(trained(name)[0], out[name])
  return out


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_numpy_llama(name, folders):
  source, model = trained(name)
  expected = numpy_llama(folders[name], TOKENS)
  logits = model.apply(jax.tree.map(jnp.asarray, source.params), jnp.asarray(TOKENS, jnp.int32))
  assert np.abs(expected).max() > 1
  np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_it_with_equal_logits(name, folders):
  torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
  source, model = trained(name)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
  with torch.no_grad():
    expected = theirs(torch.asarray(TOKENS)).logits.numpy()
  logits = np.asarray(model.apply(jax.tree.map(jnp.asarray, source.params), jnp.asarray(TOKENS, jnp.int32)))
  print(f"largest difference {np.abs(logits - expected).max():.2e} of logits up to {np.abs(expected).max():.1f}")
  np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
  text = "def f(x):\n  return 'Ā héllo 🎉'"
  ids = transformers.AutoTokenizer.from_pretrained(folders[name])(text)["input_ids"]
  assert bytes(ids) == text.encode()


@pytest.mark.parametrize("name", SHAPES)
def test_round_trip_is_exact(name, folders):
  source, _ = trained(name)
  again = export.read_folder(folders[name], source.model.scan_layers)
  assert again.model == source.model and again.seq_len == 16 and again.source == "a test"
  assert jax.tree.structure(again.params) == jax.tree.structure(source.params)
  jax.tree.map(np.testing.assert_array_equal, again.params, source.params)


def test_bfloat16_and_sharded_folders(tmp_path):
  source, _ = trained()
  narrow = source._replace(model=models.LlamaConfig(**{**source.model.__dict__, "param_dtype": "bfloat16"}),
                           params=jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16)), source.params))
  export.write_folder(narrow, str(tmp_path / "a"))
  weights = safetensors.numpy.load_file(str(tmp_path / "a" / "model.safetensors"))
  names = sorted(weights)
  for i, part in enumerate((names[::2], names[1::2])):  # as large models are published
    path = tmp_path / "a" / f"model-0000{i + 1}-of-00002.safetensors"
    safetensors.numpy.save_file({n: weights[n] for n in part}, str(path))
  os.remove(tmp_path / "a" / "model.safetensors")
  again = export.read_folder(str(tmp_path / "a"))
  assert again.model == narrow.model
  jax.tree.map(np.testing.assert_array_equal, again.params, narrow.params)


def test_byte_tokenizer_is_exact(folders):
  ours = tokenizers.Tokenizer.from_file(os.path.join(folders["grouped"], "tokenizer.json"))
  text = "\x00 \t\r\n" + "".join(map(chr, range(32, 600))) + "漢字🎉 don't  I've"
  ids = ours.encode(text).ids
  assert bytes(ids) == text.encode() and ours.decode(ids, skip_special_tokens=False) == text
  assert ours.get_vocab_size() == 256


@pytest.mark.parametrize("change, words", [
    ({"model_type": "mistral"}, "model_type='mistral'"), ({"attention_bias": True}, "attention_bias=True"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"), ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"head_dim": 16}, "head_dim=16"), ({"num_hidden_layers": 3}, "lacks the weight model.layers.2"),
    ({"intermediate_size": 47}, "does not fit"), ({"vocab_size": None}, "does not fit")])
def test_foreign_models_are_refused_in_one_sentence(change, words, folders, tmp_path):
  for name in os.listdir(folders["grouped"]):
    (tmp_path / name).write_bytes(open(os.path.join(folders["grouped"], name), "rb").read())
  config = json.loads((tmp_path / "config.json").read_text()) | change
  (tmp_path / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=words) as e:
    export.read_folder(str(tmp_path))
  assert "\n" not in str(e.value)


def test_damaged_folders_and_taken_names(folders, tmp_path):
  with pytest.raises(ValueError, match="holds no readable config.json"):
    export.read_folder(str(tmp_path))
  (tmp_path / "config.json").write_bytes(open(os.path.join(folders["grouped"], "config.json"), "rb").read())
  with pytest.raises(ValueError, match="lacks the weight model.embed_tokens.weight"):
    export.read_folder(str(tmp_path))
  (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
  with pytest.raises(ValueError, match="cannot be read"):
    export.read_folder(str(tmp_path))
  with pytest.raises(ValueError, match="is not an empty folder"):
    export.write_folder(trained()[0], str(tmp_path))
  assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


# --- runs ------------------------------------------------------------------------------------------------------------


TINY = ("rounds=2,inner_steps=2,workers=2,batch_size=2,seq_len=16,eval_every=0,eval_batches=2,eval_batch_size=4,"
        "measure_every=0,checkpoint_every=0,inner.warmup_steps=2,inner.lr=1e-2,model.dim=16,model.ffn_dim=24,model.layers=1,"
        "model.heads=2,model.kv_heads=1,data.max_bytes=40000,mesh.worker=1,method=streaming_diloco,method.fragments=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run of a method that evaluates something else than the workers' mean."""
  workdir = str(tmp_path_factory.mktemp("run") / "a")
  return workdir, trainer.train(get_config(TINY), workdir)


def heldout_loss(found, config):
  corpus = trainer.data.load(config.data, config.seq_len, config.seed)
  batches = trainer.data.heldout_batches(corpus.heldout, config.eval_batch_size, config.eval_batches)["tokens"]
  loss = models.make(found.model).loss
  return np.mean([loss(jax.tree.map(jnp.asarray, found.params), {"tokens": jnp.asarray(b)}) for b in batches])


def test_exported_model_has_the_recorded_loss(run, tmp_path):
  workdir, summary = run
  config = get_config(TINY)
  command.main([workdir, f"--out={tmp_path / 'hf'}"])
  found = export.read_folder(str(tmp_path / "hf"))
  assert heldout_loss(found, config) == pytest.approx(summary["eval_loss"], abs=1e-5)
  assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors", "tokenizer.json",
                                                 "tokenizer_config.json"]


def test_mean_is_that_of_the_saved_workers(run):
  workdir, _ = run
  config = get_config(TINY)
  model = models.make(configs.make_model_config(config, 256))
  _, round_fn = fgd.build_round(configs.make_method(config), model.loss, configs.make_inner_optimizer(config),
                                workers=fgd.Workers(2))
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), 2, config)
  state = checkpoints.restore(round_fn.abstract_state(jax.eval_shape(model.init, jax.random.key(0))))
  checkpoints.close()
  mean, evaluated = export.read_run(workdir, which="mean"), export.read_run(workdir)
  jax.tree.map(np.testing.assert_array_equal, mean.params, fgd.mean_params(state))
  differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), mean.params, evaluated.params)
  assert max(jax.tree.leaves(differences)) > 1e-6


def test_training_starts_from_an_exported_model(run, tmp_path):
  workdir, _ = run
  command.main([workdir, f"--out={tmp_path / 'hf'}"])
  config = get_config(TINY + f",init_from={tmp_path / 'hf'}")
  model = models.make(configs.make_model_config(config, 256))
  first = export.first_params(config, model)
  jax.tree.map(np.testing.assert_array_equal, first, export.read_run(workdir).params)
  config.model.dim = 32
  model = models.make(configs.make_model_config(config, 256))
  with pytest.raises(ValueError, match="has dim=16 and this run model.dim=32"):
    export.first_params(config, model)


# --- sampling --------------------------------------------------------------------------------------------------------


def test_greedy_sampling_is_the_argmax_also_beyond_the_context(folders):
  source, model = trained()
  prompt = [65, 66, 67]
  drawn = list(export.continue_tokens(model.apply, source.params, prompt, 12, context=8, temperature=0))
  tokens = list(prompt)
  for token in drawn:
    assert token == np.argmax(numpy_llama(folders["grouped"], np.array([tokens[-8:]]))[0, -1])
    tokens.append(token)


def test_sampling_draws_from_the_distribution_of_the_top_k():
  """One position, logits log(1, 2, 3, 4): among the two likeliest the probabilities are 3/7 and 4/7; at temperature 1/2,
  9/25 and 16/25."""
  apply = lambda params, tokens: jnp.broadcast_to(jnp.log(jnp.arange(1.0, 5.0)), (*tokens.shape, 4))
  for temperature, p in ((1.0, 4 / 7), (0.5, 16 / 25)):
    drawn = np.array(list(export.continue_tokens(apply, {}, [0], 1500, 4, temperature, top_k=2, seed=1)))
    assert set(drawn) == {2, 3}
    assert np.mean(drawn == 3) == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / 1500))
  draw = lambda seed: list(export.continue_tokens(apply, {}, [0], 20, 4, seed=seed))
  assert draw(5) == draw(5) != draw(6)


def test_sample_command_prints_text_of_runs_and_folders(run, tmp_path):
  workdir, _ = run
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  line = [sys.executable, "-m", "fgd_jax.export", "sample", workdir, "--prompt=def ", "--tokens=9", "--top-k=5", "--json"]
  done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
  assert done.returncode == 0 and done.stderr == ""
  out = json.loads(done.stdout)
  assert len(out["tokens"]) == 9 and out["text"] == bytes(out["tokens"]).decode(errors="replace")


def test_sampling_an_exported_folder_says_the_same(run, tmp_path, capsys):
  workdir, _ = run
  command.main([workdir, f"--out={tmp_path / 'hf'}"])
  capsys.readouterr()
  texts = []
  for folder in (workdir, str(tmp_path / "hf")):
    command.main(["sample", folder, "--prompt=import", "--tokens=12", "--seed=3"])
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1] and texts[0].startswith("import")


@pytest.mark.parametrize("arguments, words", [
    (["nowhere", "--out=x"], "is not a folder"), (["sample", "nowhere"], "is not a folder"),
    (["RUN", "--out=RUN"], "is not an empty folder"), (["RUN", "--out=x", "--round=7"], "no checkpoint of round 7"),
    (["sample", "RUN", "--temperature=-1"], "temperature=-1"), (["RUN"], "--out")])
def test_bad_input_gets_one_sentence(arguments, words, run):
  with pytest.raises(SystemExit) as e:
    command.main([word.replace("RUN", run[0]) for word in arguments])
  assert words in str(e.value) and "\n" not in str(e.value)
