"""JS sensitivity of blocks: against NumPy, on models whose answer is known, and on a run's folder."""

import csv
import itertools
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import data, models
from fgd_jax import train as trainer
from fgd_jax.checkpoint import Checkpoints
from fgd_jax.default_config import get_config
from fgd_jax.measure import js_when_shared
from fgd_jax.measure.sensitivity import ranked, within_budget
from fgd_jax.mixing import Subset, embeddings_head_early_layers
from fgd_jax.report import sensitivity

TOKENS = np.array([[[0, 1, 2, 3]], [[3, 3, 1, 4]]])  # two batches of one sequence
TINY = ("rounds=4,inner_steps=2,workers=3,batch_size=2,seq_len=16,eval_every=0,eval_batches=2,eval_batch_size=4,"
        "measure_sequences=4,inner.warmup_steps=2,model.dim=16,model.ffn_dim=24,"
        "model.layers=2,model.heads=2,model.kv_heads=1,data.source=synthetic,mesh.worker=1")


def numpy_distance(logits_a, logits_b):
  """Mean over positions of sqrt(JSD / ln 2), from the definition."""
  p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits_a, logits_b))
  kl = lambda a, b: (a * np.log(a / b)).sum(-1)
  return np.mean(np.sqrt(np.maximum(kl(p, (p + q) / 2) + kl(q, (p + q) / 2), 0) / 2 / math.log(2)))


def apply(params, tokens):
  """Linear: embedding, two matrices, head."""
  return params["embed"][tokens] @ params["layers_0"]["w"] @ params["layers_1"]["w"] @ params["lm_head"]


LABELS = {"embed": 0, "layers_0": {"w": 1}, "layers_1": {"w": 2}, "lm_head": 3}


def workers(m, seed=0, differ=("embed", "layers_0", "layers_1", "lm_head")):
  """Random parameters [m, ...]; blocks that are not in `differ` are alike."""
  rng = np.random.default_rng(seed)
  draw = lambda name, *shape: rng.normal(size=(m if name in differ else 1, *shape)) * np.ones((m, *(1,) * len(shape)))
  return {"embed": draw("embed", 5, 3), "layers_0": {"w": draw("layers_0", 3, 3)}, "layers_1": {"w": draw("layers_1", 3, 3)},
          "lm_head": draw("lm_head", 3, 6)}


def one(stack, m):
  return jax.tree.map(lambda x: x[m], stack)


# --- the pure function -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["average", "copy"])
@pytest.mark.parametrize("block", range(4))
def test_the_only_block_that_differs_has_all_of_the_drop(x64, by, block):
  name = ("embed", "layers_0", "layers_1", "lm_head")[block]
  after = js_when_shared(apply, workers(3, differ=(name,)), TOKENS, LABELS, by)
  before = after(np.zeros(4, bool))
  assert before > 0.1
  for i, row in enumerate(np.eye(4, dtype=bool)):
    assert after(row) == pytest.approx(0 if i == block else before, abs=1e-6)  # the root of a rounding error of 1e-16


@pytest.mark.parametrize("chosen", [(), (0,), (1, 3), (2,), (0, 1, 2, 3)])
def test_sharing_blocks_matches_numpy(x64, chosen):
  m, stack = 4, workers(4, seed=1)
  mask = np.isin(np.arange(4), chosen)
  averaged = jax.tree.map(lambda x, i: np.repeat(x.mean(0, keepdims=True), m, 0) if i in chosen else x, stack, LABELS)
  want = np.mean([numpy_distance(apply(one(averaged, a), TOKENS), apply(one(averaged, b), TOKENS))
                  for a, b in itertools.combinations(range(m), 2)])
  assert js_when_shared(apply, stack, TOKENS, LABELS)(mask) == pytest.approx(want, abs=1e-7)
  copied = lambda a, b: jax.tree.map(lambda x, i: x[b] if i in chosen else x[a], stack, LABELS)
  want = np.mean([numpy_distance(apply(copied(a, b), TOKENS), apply(one(stack, b), TOKENS))
                  for a, b in itertools.permutations(range(m), 2)])
  assert js_when_shared(apply, stack, TOKENS, LABELS, "copy")(mask) == pytest.approx(want, abs=1e-7)


def test_two_heads_by_hand(x64):
  """Logits (0, s + t) with s = -+ln 3 and t = -+ln 2: averaging s leaves p = (1/3, 2/3) and (2/3, 1/3), mid (1/2, 1/2)."""
  stack = {"s": np.log([1 / 3, 3]), "t": np.log([1 / 2, 2])}
  heads = lambda params, tokens: jnp.stack([jnp.zeros(tokens.shape), jnp.full(tokens.shape, params["s"] + params["t"])], -1)
  after = js_when_shared(heads, stack, TOKENS, {"s": 0, "t": 1})
  left = lambda p: math.sqrt((p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))) / math.log(2))
  assert after([True, False]) == pytest.approx(left(2 / 3))
  assert after([False, True]) == pytest.approx(left(3 / 4))
  assert after([False, False]) == pytest.approx(left(6 / 7))
  assert after([True, True]) == 0


def test_rows_of_stacked_layers_are_blocks(x64):
  stack = workers(3, seed=2)
  rows = {"embed": stack["embed"], "layers": np.stack([stack[f"layers_{i}"]["w"] for i in range(2)], 1),
          "lm_head": stack["lm_head"]}
  scanned = lambda p, t: jax.lax.scan(lambda x, w: (x @ w, None), p["embed"][t], p["layers"])[0] @ p["lm_head"]
  labels = {"embed": 0, "layers": np.array([1, 2])[:, None, None], "lm_head": 3}
  for by in ("average", "copy"):
    a, b = js_when_shared(apply, stack, TOKENS, LABELS, by), js_when_shared(scanned, rows, TOKENS, labels, by)
    for chosen in ([True, False, True, False], [False, True, False, False]):
      assert a(chosen) == pytest.approx(b(chosen), abs=1e-12)


def test_one_compilation_serves_every_choice():
  calls = []
  def counted(params, tokens):
    calls.append(1)
    return apply(params, tokens)
  after = js_when_shared(counted, workers(3), TOKENS, LABELS)
  after(np.zeros(4, bool))
  first = len(calls)
  for row in np.eye(4, dtype=bool):
    after(row)
  assert len(calls) == first


def test_what_it_refuses():
  with pytest.raises(ValueError, match="one worker"):
    js_when_shared(apply, workers(1), TOKENS, LABELS)
  with pytest.raises(ValueError, match="by='swap'"):
    js_when_shared(apply, workers(2), TOKENS, LABELS, "swap")


def test_ranking_and_greedy_choice():
  drops, sizes = [6.0, 5.0, 1.0, -1.0], [3.0, 2.0, 1.0, 1.0]  # 2, 2.5, 1 and -1 a byte
  assert ranked(drops, sizes) == [1, 0, 2, 3]
  assert within_budget(drops, sizes, 5) == [0, 1]
  assert within_budget(drops, sizes, 4) == [0, 2]  # greedy alone takes 1 and 2, whose sum is 6
  assert within_budget(drops, sizes, 3) == [1, 2]  # as good as block 0 alone
  assert within_budget(drops, sizes, 100) == [0, 1, 2]  # sharing block 3 drives workers apart
  assert within_budget(drops, sizes, 0.5) == []
  assert within_budget([1.0, 100.0], [1e-3, 50.0], 50) == [1]  # a tiny block does not keep a large one out


# --- blocks and patterns ---------------------------------------------------------------------------------------------


def llama(layers=3, **options):
  model = models.make(models.LlamaConfig(vocab_size=7, dim=8, layers=layers, heads=2, kv_heads=1, ffn_dim=10, **options))
  return jax.eval_shape(model.init, jax.random.key(0))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_blocks_of_the_decoder(scan, layers):
  blocks = sensitivity.find_blocks(llama(layers, scan_layers=scan))
  assert blocks.names == ("embed", *(f"layers_{i}" for i in range(layers)), "final_norm", "lm_head")
  layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10 + 2 * 8
  assert blocks.parameters.tolist() == [56, *[layer] * layers, 8, 56]
  assert blocks.bytes.tolist() == [224, *[4 * layer] * layers, 32, 224]
  for n in range(layers):
    got = blocks.covered(Subset(embeddings_head_early_layers(n)))
    assert blocks.listed(got) == ["embed", *(f"layers_{i}" for i in range(n)), "lm_head"]


def test_tied_embeddings_are_one_block():
  assert sensitivity.find_blocks(llama(tied=True)).names == ("embed", "layers_0", "layers_1", "layers_2", "final_norm")


@pytest.mark.parametrize("scan", [False, True])
def test_the_pattern_covers_exactly_the_chosen_blocks(scan):
  blocks = sensitivity.find_blocks(llama(12, scan_layers=scan))
  rng = np.random.default_rng(0)
  for chosen in [*np.eye(15, dtype=bool), *(rng.random((20, 15)) < 0.4)]:
    if chosen.any():
      got = blocks.covered(Subset(sensitivity.regex_of(blocks.listed(chosen))))
      np.testing.assert_array_equal(got, chosen)
  with pytest.raises(ValueError, match="a part of the block"):
    blocks.covered(Subset("attn/q"))


@pytest.mark.parametrize("text, want", [("43%", 430), ("100%", 1000), ("1.5kB", 1500), ("10MB", 1e7), (" 2 gb ", 2e9)])
def test_budgets(text, want):
  assert sensitivity.parse_budget(text, 1000) == pytest.approx(want)


@pytest.mark.parametrize("text", ["43", "101%", "0%", "-1MB", "1.2.3MB", "ten MB", "10Mb/s"])
def test_bad_budgets(text):
  with pytest.raises(ValueError, match="--budget="):
    sensitivity.parse_budget(text, 1000)


# --- a run's folder --------------------------------------------------------------------------------------------------


def saved(folder, words="", rounds=0):
  """A run's folder with the checkpoint after `rounds` rounds; also the JS distance that the trainer measures in the next."""
  config = get_config(TINY + words)
  corpus = data.load(config.data, config.seq_len, config.seed)
  model = models.make(configs.make_model_config(config, corpus.vocab_size))
  heldout = data.heldout_batches(corpus.heldout, config.eval_batch_size, config.eval_batches)["tokens"]
  init, round_fn = configs.build_round(config, model.loss, fgd.Workers(config.workers),
                                       (trainer.js_of(model.apply, heldout[0, :, :-1]),))
  state, checkpoints = init(model.init(jax.random.key(0))), Checkpoints(os.path.join(folder, "checkpoints"), 1, config)
  batches = trainer.read_rounds(config, corpus, checkpoints.progress, range(config.workers))
  for _ in range(rounds):
    state, _ = round_fn(state, next(batches))
  checkpoints.save(state, batches)
  checkpoints.close()
  return str(folder), float(round_fn(state, next(batches))[1]["js_distance"]) if rounds else None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return saved(tmp_path_factory.mktemp("run") / "a", rounds=2)


def files_of(folder):
  return {os.path.join(path, name): os.stat(os.path.join(path, name)).st_mtime_ns
          for path, _, names in os.walk(folder) for name in names}


def test_the_command(run, capsys, tmp_path):
  """Its inner phase is the trainer's: the JS distance is that of the next round."""
  run, distance = run
  before = files_of(run)
  sensitivity.main([run, "--sequences=4", "--json", f"--out={tmp_path}", "--budget=70%"])
  found = json.loads(capsys.readouterr().out)
  assert files_of(run) == before
  assert found["js_before"] == pytest.approx(distance, rel=1e-4)
  assert found["round"] == 2 and found["at"] == "inner" and found["positions"] == 64
  assert sorted(os.listdir(tmp_path)) == [f"round_2_inner_average.{kind}" for kind in ("csv", "json", "png")]
  with open(tmp_path / "round_2_inner_average.csv", newline="") as f:
    rows = list(csv.DictReader(f))
  assert [r["block"] for r in rows] == ["embed", "layers_0", "layers_1", "final_norm", "lm_head"]
  assert sorted(int(r["rank"]) for r in rows) == [1, 2, 3, 4, 5]
  for r in rows:
    assert float(r["drop"]) == pytest.approx(found["js_before"] - float(r["js_after"]))
    assert float(r["drop_per_mb"]) == pytest.approx(float(r["drop"]) / int(r["bytes"]) * 1e6)
  assert found["greedy"]["bytes"] <= found["budget_bytes"] == pytest.approx(0.7 * found["total_bytes"])
  assert found["greedy"]["blocks"] == [r["block"] for r in rows if r["chosen"] == "True"]
  assert found["paper"]["blocks"] == [r["block"] for r in rows if r["paper"] == "True"]
  train_with(get_config(TINY), found)


def train_with(config, found):
  """The trainer's Mix2 with the printed words sends the bytes of the chosen blocks."""
  configs.apply_variant(config, found["greedy"]["words"])
  configs.validate(config)
  model = models.make(configs.make_model_config(config, 64))
  _, round_fn = configs.build_round(config, model.loss, fgd.Workers(3))
  state = round_fn.abstract_state(jax.eval_shape(model.init, jax.random.key(0)))
  batches = {"tokens": jax.ShapeDtypeStruct((3, 2, 2, 17), jnp.int32)}
  assert round_fn.traffic(state.params, batches)[1] == found["greedy"]["bytes"]


def test_stacked_layers_and_a_method_without_mix2(tmp_path):
  words = ",model.scan_layers=True,method=GlobalM1"
  found = sensitivity.measure(sensitivity.read(saved(tmp_path, words)[0]), budget="60%")
  assert [r["block"] for r in found["blocks"]] == ["embed", "layers_0", "layers_1", "final_norm", "lm_head"]
  assert found["js_before"] > 0 and found["greedy"]["words"].startswith("method=GlobalM1LocalM2,")
  train_with(get_config(TINY + words), found)


def test_table_and_the_place_after_the_outer_step(run, capsys):
  run, _ = run
  sensitivity.main([run, "--at=outer", "--by=copy"])
  text = capsys.readouterr().out
  assert "round 2, after the outer step" in text and "embeddings_head_early_layers(2)" in text
  assert os.path.exists(os.path.join(run, "sensitivity", "round_2_outer_copy.png"))
  with pytest.raises(SystemExit, match="smallest block"):
    sensitivity.main([run, "--at=outer", "--budget=0.01%"])


@pytest.mark.parametrize("words, has", [
    ("", True), ("method=fgd,method.mix1=random_pairs", True), ("method=GlobalM1LocalM2-subset", True),
    ("method=GlobalM1", False), ("method=GlobalM1LocalM2,method.mix2=identity", False),
    ("method=GlobalM1,method.momentum=recovered", False), ("method=diloco,method.codec=topk", False),
    ("method=isoloco", False), ("method=noloco,method.group_size=2", False), ("method=eager_diloco,method.delay=2", False),
    ("method=streaming_diloco,method.fragments=2,method.delay=0", False), ("method=gasloc,method.alpha=0.5", False),
    ("method=pipelined_diloco,method.fragments=2,method.guess=own", False)])
def test_the_printed_words_fit_every_method(words, has):
  config = get_config(f"workers=4,inner_steps=4,{words}".rstrip(","))
  configs.validate(config)
  assert sensitivity.takes_subset(config) == has
  printed = sensitivity._for_training(config, sensitivity.find_blocks({"embed": np.zeros(2), "b": np.zeros(3)}),
                                      np.array([True, False]))["words"]
  configs.apply_variant(config, printed)
  configs.validate(config)
  assert sensitivity.takes_subset(config) and config.method.subset == "^(embed)/"


def test_the_table_comes_before_files_that_cannot_be_written(run, capsys, tmp_path, monkeypatch):
  (tmp_path / "file").write_text("mine")
  with pytest.raises(SystemExit, match="file"):  # at once
    sensitivity.main([run[0], f"--out={tmp_path / 'file'}"])
  assert "JS distance" not in capsys.readouterr().out and (tmp_path / "file").read_text() == "mine"

  def full(*_):
    raise OSError("No space left on device")

  monkeypatch.setattr(sensitivity, "write", full)
  with pytest.raises(SystemExit, match="No space left"):
    sensitivity.main([run[0], "--at=outer", f"--out={tmp_path / 'out'}"])
  assert "For training" in capsys.readouterr().out


@pytest.mark.parametrize("options, words", [
    (["--round=7"], "no checkpoint of round 7"), (["--sequences=9"], "--sequences=9"),
    (["--budget=much"], "--budget='much'"), (["--by=swap"], "--by"), (["--at=noon"], "--at")])
def test_bad_options(run, options, words):
  with pytest.raises(SystemExit, match=words):
    sensitivity.main([run[0], *options])


def test_a_step_folder_has_one_round(run):
  with pytest.raises(SystemExit, match="round 2, not of round 5"):
    sensitivity.main([os.path.join(run[0], "checkpoints", "2"), "--round=5"])


def test_folders_that_cannot_be_measured(tmp_path):
  for name in ("empty", "decoupled/syncer"):
    os.makedirs(tmp_path / name)
  for name, words in (("missing", "not a folder"), ("empty", "no complete checkpoint"), ("decoupled", "fgd_jax.decoupled")):
    with pytest.raises(SystemExit, match=words):
      sensitivity.main([str(tmp_path / name)])


def test_workers_without_disagreement(tmp_path):
  with pytest.raises(SystemExit, match="nothing to compare; use --at=inner"):
    sensitivity.main([saved(tmp_path / "a", ",method=diloco")[0], "--at=outer"])
  with pytest.raises(SystemExit, match="workers=1"):
    sensitivity.main([saved(tmp_path / "b", ",method=diloco,workers=1")[0]])
  with pytest.raises(SystemExit, match="data_parallel, which averages gradients"):
    sensitivity.main([saved(tmp_path / "c", ",method=data_parallel", rounds=1)[0]])
