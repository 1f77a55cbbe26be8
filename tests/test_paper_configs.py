"""configs/paper: the published shape, budgets and methods, on shapes alone; benchmarks/paper_dry_run.py compiles."""

import os
import runpy

import jax
import numpy as np
import pytest

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import models
from fgd_jax.netsim.plan import load_config

PATH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs", "paper", "fgd_1p5b.py")
LAYER = 2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192 + 2 * 2048
ENDS = 2 * 128_256 * 2048  # embedding and head
TOTAL = ENDS + 16 * LAYER + 2048
MEAN8, MEAN16 = 2 * 7 / 8, 2 * 15 / 16  # copies that a worker sends in a ring all-reduce
# run: (overlapped, blocking) parameters that a worker sends in a round of H = 100, M = 8 (methods-core.md 4.3, 4.6)
SENT = {
  "method=data_parallel": (0, 100 * MEAN8 * TOTAL),
  "method=diloco": (0, MEAN8 * TOTAL),
  "method=GlobalM1LocalM2": (MEAN8 * TOTAL, TOTAL),
  "method=GlobalM1LocalM2-subset": (MEAN8 * TOTAL, ENDS + 2 * LAYER),
  "method=LocalM1M2": (TOTAL, TOTAL),
  "method=GlobalM1": (MEAN8 * TOTAL, 0),
  "method=GlobalM1,method.mix_outer_state=mix1": (2 * MEAN8 * TOTAL, 0),
}


def runs():
  return runpy.run_path(PATH)["RUNS"]


def test_every_variant_of_the_table_is_there():
  assert list(runs().values()) == list(SENT)
  assert list(runs()) == ["Sync-DP", "DiLoCo", "GlobalM1LocalM2", "GlobalM1LocalM2-subset", "LocalM1M2", "GlobalM1",
                          "GlobalM1S"]


@pytest.mark.parametrize("words", SENT)
def test_methods_build_on_the_published_shape_and_send_what_the_paper_says(words):
  c = load_config(f"{PATH}:{words}")
  model = models.make(configs.make_model_config(c, 128_256))
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert models.count_params(params) == TOTAL
  assert round(TOTAL / 1e9, 3) == 1.498
  assert round(100 * (ENDS + 2 * LAYER) / TOTAL, 1) == 43.2
  _, round_fn = configs.build_round(c, model.loss, fgd.Workers(8))
  tokens = jax.ShapeDtypeStruct((8, 100, c.batch_size, c.seq_len + 1), np.int32)
  assert round_fn.traffic(round_fn.abstract_state(params).params, {"tokens": tokens}) == pytest.approx(
    tuple(4 * n for n in SENT[words]))


@pytest.mark.parametrize("words", SENT)
@pytest.mark.parametrize("workers", [8, 16])
@pytest.mark.parametrize("steps", [100, 500, 1000])
@pytest.mark.parametrize("tokens", ["10e9", "30e9"])
def test_every_run_validates_and_spends_its_budget_within_a_round(words, workers, steps, tokens):
  c = load_config(f"{PATH}:{words},workers={workers},inner_steps={steps},tokens={tokens}")
  configs.validate(c)
  assert (c.workers, c.inner_steps) == (workers, steps)
  a_round = workers * steps * c.batch_size * c.seq_len
  assert abs(c.rounds * a_round - float(tokens)) <= a_round / 2
  assert c.inner.schedule == "cosine"  # which ends with the run: test_config.py
  assert c.eval_every * steps == c.checkpoint_every * steps == 1000


def test_ten_billion_tokens_are_usual_and_words_win():
  assert load_config(PATH).rounds == load_config(f"{PATH}:tokens=1e10").rounds == 191  # 10e9 / (8 x 32 x 2048 x 100)
  c = load_config(f"{PATH}:rounds=7,tokens=30e9,eval_every=3")
  assert (c.rounds, c.eval_every) == (7, 3)


def test_the_budget_holds_whatever_sets_the_keys():
  c = load_config(f"{PATH}:method=diloco,tokens = 1e9, tokens=30e9")
  assert c.rounds == 572
  c.workers, c.inner_steps = 16, 500  # as --config.workers=16 --config.inner_steps=500 do
  assert c.rounds == round(30e9 / (16 * 32 * 2048 * 500)) == 57 and c.eval_every == c.checkpoint_every == 2
  c.eval_every = 7
  assert (c.eval_every, c.checkpoint_every) == (7, 2)
  configs.validate(c)
  c.inner_steps = 0
  with pytest.raises(ValueError, match="inner_steps.* is 0; each must be at least 1"):
    configs.validate(c)
  with pytest.raises(ValueError, match="rounds=0 must be at least 1"):
    configs.validate(load_config(f"{PATH}:tokens=1"))
  assert load_config(f"{PATH}:method=GlobalM1S").method.mix_outer_state == "mix1"


@pytest.mark.parametrize("word", ["tokens=many", "tokens=-1", "tokens=nan", "tokens="])
def test_a_budget_that_is_none_is_named(word):
  with pytest.raises(ValueError, match="tokens"):
    load_config(f"{PATH}:{word}")
