"""The recommendation: its table is made of docs/compare, its arithmetic is the stated one."""

import csv
import fnmatch
import math
import os
import sys
import tomllib

import numpy as np
import pytest

from fgd_jax import netsim
from fgd_jax.netsim import recommend as rec
from fgd_jax.netsim.failures import StepTimes
from fgd_jax.netsim.links import Links

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = ("recommend", "--bandwidth=1Gbps", "--params=1.5e9", "--step-seconds=2")


def test_the_shipped_table_is_that_of_the_measurements(monkeypatch):
  """What benchmarks/netsim_losses.py makes of docs/compare now, and the means of results.csv read independently."""
  monkeypatch.syspath_prepend(os.path.join(ROOT, "benchmarks"))
  try:
    import netsim_losses
    with open(os.path.join(ROOT, "fgd_jax/netsim/losses.csv"), newline="") as f:
      assert list(csv.DictReader(f)) == [{k: str(v) for k, v in row.items()} for row in netsim_losses.table()]
  finally:
    for name in ("netsim_losses", "compare_methods"):
      sys.modules.pop(name, None)
  with open(os.path.join(ROOT, "docs/compare/results.csv"), newline="") as f:
    finals = [r for r in csv.DictReader(f) if r["purpose"] == "final"]
  table = {(r.name, r.inner_steps, r.steps): r for r in rec.read_losses()}
  assert len({r["method"] for r in finals}) == 14
  for name in {r["method"] for r in finals}:
    losses = [float(r["eval_loss"]) for r in finals if r["method"] == name]
    row = table[name, 10, 240]
    assert row.loss == pytest.approx(np.mean(losses), abs=6e-5) and row.seeds == len(losses)


def test_the_table_is_installed_with_the_package():
  with open(os.path.join(ROOT, "pyproject.toml"), "rb") as f:
    patterns = tomllib.load(f)["tool"]["setuptools"]["package-data"]["fgd_jax.netsim"]
  assert any(fnmatch.fnmatch("losses.csv", pattern) for pattern in patterns)


def test_relative_steps():
  """On DiLoCo's curve, linear in log steps; beyond it nothing is known."""
  loss = lambda name, steps, value, h=10: rec.Loss(name, name, {}, h, steps, value, 1)
  table = [loss("diloco", 60, 3.0), loss("diloco", 240, 2.0), loss("diloco", 960, 1.5), loss("good", 240, 1.75),
           loss("bad", 240, 2.5), loss("best", 240, 1.2), loss("bad", 240, 3.0, h=40), loss("local", 240, 2.9)]
  got = rec.relative_steps(table)
  assert got.keys() == {("diloco", 10), ("good", 10), ("bad", 10), ("best", 10), ("bad", 40)}
  assert got["diloco", 10] == pytest.approx(1) and got["good", 10] == pytest.approx(240 / 480)
  assert got["bad", 10] == pytest.approx(240 / 120) and got["bad", 40] == pytest.approx(4) and math.isnan(got["best", 10])


def test_hours_are_steps_times_simulated_rounds(printed):
  """Every row against its own plan; the ranking is by hours, of trained H alone."""
  got = printed(*WORDS, "--steps=5000", "--inner-steps=20,100")
  rows, relative = got["methods"], rec.relative_steps(rec.read_losses())
  assert {(r["name"], r["inner_steps"]) for r in rows if r["trained"]} == set(relative)
  assert {r["name"] for r in rows if not r["trained"]} == {name for name, _ in relative} - {"data_parallel"}
  ranked = [r for r in rows if r["rank"]]
  assert [r["rank"] for r in ranked] == list(range(1, len(ranked) + 1)) and got["recommended"] == ranked[0]
  assert ranked == sorted(ranked, key=lambda r: r["hours"]) and all(r["trained"] for r in ranked)
  for r in rows:
    if r["trained"]:
      assert r["relative_steps"] == pytest.approx(relative[r["name"], r["inner_steps"]])
    assert r["hours"] == pytest.approx(5000 * r["relative_steps"] * r["round_seconds"] / r["inner_steps"] / 3600)
  by = {(r["name"], r["inner_steps"]): r for r in rows}
  transfer = 1.75 * 1.5e9 * 16 / 1e9  # 42 s for a mean
  assert by["diloco", 10]["hours"] == pytest.approx(5000 / 10 * (20 + transfer) / 3600)
  assert by["GlobalM1", 10]["round_seconds"] == pytest.approx(transfer) and by["GlobalM1", 100]["round_seconds"] == 200
  assert by["diloco", 100]["relative_steps"] == by["diloco", 40]["relative_steps"]
  between = (by["diloco", 10]["relative_steps"] + by["diloco", 40]["relative_steps"]) / 2
  assert by["diloco", 20]["relative_steps"] == pytest.approx(between)  # 20 is in the middle of 10 and 40, by ratio
  assert len(got["assumptions"]) >= 4


def test_faster_links_favour_fewer_steps(printed, capsys):
  """Where links cost nothing the method with the fewest steps is first; where they are very slow, long intervals are."""
  relative = rec.relative_steps(rec.read_losses())
  fast = printed(*WORDS, "--bandwidth=1000Tbps")["recommended"]
  assert (fast["name"], fast["inner_steps"]) == min(relative, key=relative.get)
  assert printed(*WORDS, "--bandwidth=10Mbps")["recommended"]["inner_steps"] == max(h for _, h in relative)
  netsim.__main__.main(list(WORDS))
  text = capsys.readouterr().out
  assert "Assumed:" in text and "0.46 million" in text and "soonest:" in text


def test_uneven_links_are_simulated():
  """One slow link of eight holds up a mean in every round, a pair in one of seven."""
  rates = np.full(8, 1e9)
  rates[0] = 1e8
  even, uneven = (rec.recommend(1e8, 16, Links(r), StepTimes((1.0,)), 1000) for r in (np.full(8, 1e9), rates))
  slower = lambda name: next(b["round_seconds"] / a["round_seconds"] for a, b in zip(
      sorted(even["methods"], key=lambda r: (r["name"], r["inner_steps"])),
      sorted(uneven["methods"], key=lambda r: (r["name"], r["inner_steps"]))) if a["name"] == name)
  assert slower("gasloc") < slower("diloco")
  with pytest.raises(ValueError, match="steps=0"):
    rec.recommend(1e8, 16, Links(rates), StepTimes((1.0,)), 0)
