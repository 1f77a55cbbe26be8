"""The network simulator: published tables, closed forms against events, failures, the command.

Published figures: methods-core.md 2.4 (arXiv 2501.18512), 4.6 (2606.22768), 8.6 (2604.21428), as read in those papers or in
summaries of them; everything else here is algebra.
"""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from fgd_jax import methods, netsim
from fgd_jax.netsim import __main__ as command
from fgd_jax.netsim import closed, published
from fgd_jax.netsim.events import Network, Simulator
from fgd_jax.netsim.failures import Drops, Interruptions, StepTimes, parse_step_times
from fgd_jax.netsim.layers import Layered, data_parallel_utilization, step_graph
from fgd_jax.netsim.links import Links, cost, parse_bandwidth, read_links

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GBIT = 1e9
# M = 8, H = 10, S = 1 Gbit: at 1 Gbit/s a ring all-reduce takes 1.75 s, a swap 1 s.
M, H, PARAMS = 8, 10, 1e9 / 16


def plan(method, workers=M, steps=H, **kw):
  return netsim.make_plan(method, PARAMS, 16, workers, steps, **kw)


def round_of(method, rate=GBIT, step=1.0, workers=M, steps=H, latency=0.0, **kw):
  """Seconds of a simulated round on equal links."""
  links = Links(np.full(workers, rate), latency)
  return netsim.simulate(plan(method, workers, steps, **kw), links, StepTimes((step,)), rounds=2).round_seconds


def run(*words):
  """The command in this process; what it prints."""
  command.main(list(words))


def printed(capsys, *words):
  run(*words, "--json")
  return json.loads(capsys.readouterr().out)


# --- published tables ----------------------------------------------------------------------------------------------------


def test_fgd_table(capsys):
  """The seven published utilisations, each within 1 point, from one free number (the step time)."""
  cells = {(c["row"], c["column"]): c["simulated"] for c in printed(capsys, "table", "fgd")["cells"]}
  wanted = {("diloco", "100Mbps"): 36, ("diloco", "200Mbps"): 53, ("GlobalM1", "100Mbps"): 56, ("GlobalM1", "200Mbps"): 100,
            ("GlobalM1LocalM2", "100Mbps"): 36, ("GlobalM1LocalM2", "200Mbps"): 66,
            ("GlobalM1LocalM2-subset", "100Mbps"): 45}
  assert cells.keys() == wanted.keys()
  for key, value in wanted.items():
    assert abs(cells[key] - value) <= 1, key


def test_data_parallel_in_the_fgd_setting_is_about_one_percent(capsys):
  got = printed(capsys, "utilization", "--method=data_parallel", "--params=1.498e9", "--step-seconds=2.35",
                "--bandwidth=100Mbps,200Mbps")["results"]
  assert [round(100 * r["compute_utilization"], 1) for r in got] == [0.6, 1.1]


def test_streaming_table(capsys):
  """At least 80 % of the 25 published cells within one step of the grid of which they are values."""
  wanted = {"data_parallel": [86.8, 152.6, 184.2, 222.3, 569.0], "diloco": [1.4, 6.2, 13.3, 23.3, 86.8],
            "streaming": [1.4, 5.2, 9.1, 16.0, 28.1], "streaming_overlap": [1.4, 4.3, 6.2, 9.1, 11.0],
            "streaming_overlap_fp4": [0.4, 0.9, 1.7, 2.0, 3.0]}
  got = printed(capsys, "table", "streaming", "--size=1B")
  assert got.keys() == wanted.keys()
  ratio = 10 ** (4 / 49)
  near = [abs(math.log(a / b) / math.log(ratio)) < 1.3 for m in wanted for a, b in zip(got[m], wanted[m])]  # 0.3: rounding
  assert len(near) == 25 and sum(near) >= 20


def test_published_cells_are_values_of_the_grid():
  """All cells of at least 10 Gbit/s are, to the printed decimal or one unit of it, 10^(-1 + 4 k / 49)."""
  large = [c for row in published.STREAMING_1B.values() for c in row if c >= 10]
  assert all(min(abs(g - c) for g in published.GRID) < 0.06 for c in large) and len(large) == 11


def test_streaming_table_of_larger_models_orders_the_methods():
  """Each of the paper's steps (fragments, overlap, FP4) lowers what is needed; FP4 sends a quarter of the bits."""
  table = published.streaming_table("10B")
  names = list(table)
  assert all(a >= b for x, y in zip(names, names[1:]) for a, b in zip(table[x], table[y]))
  models = published.streaming_models("10B")
  at = lambda name, rate: models[name].utilization(rate)
  assert at("streaming_overlap", 4e9) == pytest.approx(at("streaming_overlap_fp4", 1e9), abs=1e-12)


def test_goodput_table(capsys):
  """Goodput of Decoupled DiLoCo's simulator, each cell within 2 points."""
  wanted = {"data_parallel, rigid": (72, 57, 27), "data_parallel, elastic": (88, 80, 58), "2 learners": (94, 88, 70),
            "4 learners": (96, 93, 82), "8 learners": (98, 96, 88), "16 learners": (99, 98, 93)}
  cells = printed(capsys, "table", "goodput")["cells"]
  got = {row: [c["simulated"] for c in cells if c["row"] == row] for row in wanted}
  for row, values in wanted.items():
    assert got[row] == pytest.approx(values, abs=2), row


def test_failures_table(capsys):
  """DiLoCo repeats what failed; FGD's pairs and skipped means cost it no time (4.7)."""
  rows = {r["method"]: r for r in printed(capsys, "table", "failures", "--drop=0.05")["rows"]}
  for unit, p in (("message", 0.05), ("link", 1 - 0.95**8)):
    compute, comm = 0.56, 0.5  # in units of T_global at 100 Mbit/s: DiLoCo at 200 Mbit/s
    assert rows["diloco"][f"{unit}_closed_form"] == pytest.approx(100 * compute / (compute + comm / (1 - p)))
    assert rows["diloco"][unit] == pytest.approx(rows["diloco"][f"{unit}_closed_form"], abs=1.5)
    for method in ("GlobalM1", "GlobalM1LocalM2", "GlobalM1LocalM2-subset", "LocalM1M2"):
      assert rows[method][unit] == pytest.approx(rows[method]["none"])
    assert rows["GlobalM1"][f"{unit}_skipped"] == pytest.approx(p, abs=0.07)


# --- closed forms against events -----------------------------------------------------------------------------------------


def test_rounds_by_hand():
  """10 s of compute; 1.75 s for a mean, 1 s for a swap."""
  assert round_of("diloco") == pytest.approx(11.75)
  assert round_of("GlobalM1") == pytest.approx(10)
  assert round_of("GlobalM1LocalM2") == pytest.approx(11)
  assert round_of("GlobalM1LocalM2-subset", subset_share=0.432) == pytest.approx(10.432)
  assert round_of("LocalM1M2") == round_of("noloco") == pytest.approx(11)
  assert round_of("gasloc") == pytest.approx(11)
  assert round_of("eager_diloco") == pytest.approx(10)
  assert round_of("isoloco") == pytest.approx(11.75)
  assert round_of("data_parallel") == pytest.approx(10 + 10 * 1.75)
  assert round_of("local") == pytest.approx(10)


def test_late_mix1_shares_the_link_with_mix2():
  """At 0.1 Gbit/s Mix1 needs 17.5 s, Mix2 10 s: the round ends when the link has carried both."""
  assert round_of("GlobalM1LocalM2", rate=GBIT / 10) == pytest.approx(27.5)
  assert round_of("LocalM1M2", rate=GBIT / 10) == pytest.approx(20)
  result = netsim.simulate(plan("GlobalM1LocalM2"), Links(np.full(M, GBIT / 10)), StepTimes((1.0,)), rounds=1)
  end = {s.what: s.end for s in result.timeline if s.lane == "links"}
  assert end["mix1"] == pytest.approx(25)  # 7.5 s of it are left at 10 s, and it then has half of the link
  assert end["mix2"] == pytest.approx(27.5)


def test_fragments_overlap_a_delay_or_a_whole_interval():
  """5 fragments of 0.35 s, 2 steps apart; at 0.1 Gbit/s of 3.5 s."""
  slow, options = GBIT / 10, {"fragments": 5}
  assert round_of("streaming_diloco", options={**options, "delay": 0}) == pytest.approx(10 + 5 * 0.35)
  assert round_of("streaming_diloco", options={**options, "delay": 1}) == pytest.approx(10)
  assert round_of("streaming_diloco", slow, options={**options, "delay": 1}) == pytest.approx(10 + 5 * 2.5)
  assert round_of("pipelined_diloco", slow, options=options) == pytest.approx(10 + 5 * 1.5)


@pytest.mark.parametrize("rate", [1e8, 3e8, 1e9, 1e10])
@pytest.mark.parametrize("method", sorted([*methods.METHODS, *methods.PRESETS]))
def test_closed_form_equals_events(method, rate):
  """Every method and preset on equal links."""
  p, links = plan(method), Links(np.full(M, rate))
  wanted = closed.utilization(p, links, 1.0)
  assert netsim.simulate(p, links, StepTimes((1.0,)), rounds=3).compute_utilization == pytest.approx(wanted, rel=1e-9)


def test_cost_of_collectives():
  """Ring 2 (M-1)/M, tree 2 log2 M, recursive doubling log2 M, a server 2 M, an all-gather M - 1 payloads."""
  assert [cost(kind, 8).path for kind in ("ring", "tree", "pairwise", "server", "allgather")] == [1.75, 6, 3, 16, 7]
  for kind, seconds in (("ring", 1.75), ("tree", 6), ("pairwise", 3), ("server", 16), ("allgather", 7)):
    assert round_of("diloco", kind=kind) == pytest.approx(10 + seconds)
  assert round_of("diloco", latency=0.01) == pytest.approx(11.75 + 14 * 0.01)
  assert round_of("gasloc", latency=0.01) == pytest.approx(11.01)
  assert all(cost(kind, 1).path == 0 for kind in ("ring", "tree", "pairwise", "server", "allgather"))


def test_processor_sharing():
  """Flows of 10 and 4 bytes on a link of 2 bytes/s: the short one at 4 s, the long one at 7 s; a third is cancelled."""
  sim = Simulator()
  net, ends = Network(sim, {"link": 2.0}), {}
  net.send(["link"], 10).then(lambda _: ends.update(long=sim.now))
  net.send(["link"], 4).then(lambda _: ends.update(short=sim.now))
  gone = net.send(["link"], 4, latency=5)
  sim.at(5.0, lambda: net.cancel(gone), late=True)
  sim.run()
  assert ends == {"short": pytest.approx(4), "long": pytest.approx(7)} and net.carried == 14


def test_layers_graph_has_4l_minus_1_nodes():
  """Spec 2.4; every node stands behind what it needs."""
  for layers in (1, 2, 24):
    nodes = step_graph(layers)
    assert len(nodes) == len({n[:2] for n in nodes}) == 4 * layers - 1
    for i, node in enumerate(nodes):
      assert set(node.after) <= {n[:2] for n in nodes[:i]}


@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10, 3e10, 1e11, 1e12])
@pytest.mark.parametrize("layers", [1, 2, 3, 24])
def test_layers_closed_form(layers, rate):
  got = Layered(layers, 0.1, 16e9, fragments=0).utilization(rate)
  assert got == pytest.approx(data_parallel_utilization(layers, 0.1, 16e9, rate), rel=1e-9)


def test_one_layer_is_the_plain_model():
  """With one layer nothing overlaps the backward pass: DiLoCo is compute plus transfer, in both simulators."""
  model = Layered(1, 1.0, 1.75e9, H, 1)
  assert model.utilization(GBIT) == pytest.approx(10 / 11.75)
  assert model.utilization(GBIT) == pytest.approx(10 / round_of("diloco"))


# --- failures, stragglers, uneven links ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drops", [Drops(0.2), Drops(0.05, "link"), Drops(0.3, at="uniform"), Drops(0.3, "round")])
def test_geometric_retries(drops):
  """DiLoCo's failed collectives: attempts 1/(1-p), with p_eff = 1-(1-p)^M for links; one more in a bad round."""
  p = {"message": drops.probability, "link": 1 - (1 - drops.probability) ** M, "round": drops.probability}[drops.unit]
  failed = p if drops.unit == "round" else p / (1 - p)
  wanted = 10 + 1.75 * (1 + failed * (0.5 if drops.at == "uniform" else 1))
  links = Links(np.full(M, GBIT))
  assert closed.round_seconds(plan("diloco"), links, 1.0, drops) == pytest.approx(wanted)
  result = netsim.simulate(plan("diloco"), links, StepTimes((1.0,)), drops, rounds=3000)
  assert result.round_seconds == pytest.approx(wanted, rel=0.01)
  assert result.retries == pytest.approx(failed, rel=0.15)


def test_late_mean_that_failed_waits_or_is_skipped():
  """GlobalM1 with a mean of 7 s in 10 s of compute: attempts at 7, 14, 21 s ...; waiting costs E max(7 n - 10, 0)."""
  rate, p = 0.25 * GBIT, 0.3
  wait = sum((1 - p) * p ** (n - 1) * max(7 * n - 10, 0) for n in range(1, 200))
  links = Links(np.full(M, rate))
  for policy, late in (("wait", wait), ("skip", 0.0)):
    drops = Drops(p, late_mix1=policy)
    assert closed.round_seconds(plan("GlobalM1"), links, 1.0, drops) == pytest.approx(10 + late)
    result = netsim.simulate(plan("GlobalM1"), links, StepTimes((1.0,)), drops, rounds=2000)
    assert result.round_seconds == pytest.approx(10 + late, rel=0.02)
    assert result.skipped == pytest.approx(p if policy == "skip" else 0, abs=0.03)


@pytest.mark.parametrize("drops", [Drops(0.3), Drops(0.1, "link", late_mix1="wait"), Drops(0.3, "round", late_mix1="wait"),
                                   Drops(0.4, at="uniform"), Drops(0.4, late_mix1="wait")])
@pytest.mark.parametrize("method", ["GlobalM1", "GlobalM1LocalM2", "LocalM1M2", "data_parallel", "streaming_diloco"])
def test_closed_form_equals_events_with_failures(method, drops):
  """Where there is a closed form: the long-run mean of the simulated rounds, means of 2.9 s in 10 s of compute."""
  p, links = plan(method, options={"fragments": 5} if "streaming" in method else None), Links(np.full(M, 0.6 * GBIT))
  wanted = closed.round_seconds(p, links, 1.0, drops)
  if wanted is not None:
    assert netsim.simulate(p, links, StepTimes((1.0,)), drops, rounds=400).round_seconds == pytest.approx(wanted, rel=0.025)


def test_a_skipped_mean_leaves_the_link_to_mix2():
  """The mean (7 s) fails for certain at 7 s, its repetition is cancelled at 10 s: Mix2 has the link alone (4 s)."""
  result = netsim.simulate(plan("GlobalM1LocalM2"), Links(np.full(M, 0.25 * GBIT)), StepTimes((1.0,)), Drops(0.999999),
                           rounds=3)
  assert result.round_seconds == pytest.approx(14) and result.skipped == 1 and result.lost_pairs == 4


def test_pairs_keep_their_own_value_and_lose_no_time():
  drops = Drops(0.25)
  result = netsim.simulate(plan("LocalM1M2"), Links(np.full(M, GBIT)), StepTimes((1.0,)), drops, rounds=1000)
  assert result.round_seconds == pytest.approx(11) and result.retries == 0
  assert result.lost_pairs == pytest.approx(2 * 4 * 0.25, rel=0.1)  # Mix1 and Mix2, four pairs each


def test_a_straggler_holds_up_everybody_or_its_partner():
  """One of 8 workers takes 2 s a step: DiLoCo's round is 20 s + 1.75 s; without exchanges only its own."""
  times = StepTimes((2.0,) + (1.0,) * 7)
  links = Links(np.full(M, GBIT))
  diloco = netsim.simulate(plan("diloco"), links, times, rounds=2)
  assert diloco.worker_utilization == pytest.approx([20 / 21.75] + [10 / 21.75] * 7)
  pairs = netsim.simulate(plan("gasloc"), links, times, rounds=1)
  assert sum(u == pytest.approx(10 / 11) for u in pairs.worker_utilization) == 6
  assert netsim.simulate(plan("local"), links, times, rounds=3).compute_utilization == 1


def test_a_slow_link_holds_up_only_its_partner():
  """One link of 8 at a tenth: a ring goes at its rate, of pairs only two workers wait."""
  links = Links(np.array([GBIT / 10] + [GBIT] * 7))
  assert netsim.simulate(plan("diloco"), links, StepTimes((1.0,)), rounds=1).round_seconds == pytest.approx(27.5)
  waits = sorted(netsim.simulate(plan("gasloc"), links, StepTimes((1.0,)), rounds=1).worker_utilization)
  assert waits == pytest.approx([0.5] * 2 + [10 / 11] * 6)


def test_matrix_of_bandwidths(tmp_path):
  """Rates by pair: a ring goes at that of its slowest edge, a swap at the slower of its directions."""
  file = tmp_path / "links.txt"
  file.write_text("# from each worker (row) to each\n0 1Gbps 1Gbps 500Mbps\n1Gbps 0 1Gbps 1Gbps\n1Gbps 1Gbps 0 1Gbps\n"
                  "250Mbps 1Gbps 1Gbps 0\n".replace(" 0", " -").replace("\n0", "\n-"))
  links = read_links(str(file), 4)
  assert links.uniform is None
  result = netsim.simulate(plan("diloco", 4), links, StepTimes((1.0,)), rounds=1)
  assert result.round_seconds == pytest.approx(10 + 1.5 * 4)  # 3 -> 0 is an edge of the ring
  with pytest.raises(ValueError, match="4 rates for 5 workers|5 lines of 5 rates"):
    read_links(str(file), 5)


def test_crashes_wait_or_proceed():
  """One crash in 100 s of computing on average, 50 s until the worker is back."""
  links, crashes = Links(np.full(M, GBIT)), Interruptions(100, 50)
  wait, go = (netsim.simulate(plan("diloco"), links, StepTimes((1.0,)), crashes=crashes, on_crash=policy, rounds=300)
              for policy in ("wait", "proceed"))
  assert wait.compute_utilization < go.compute_utilization < 10 / 11.75
  assert go.compute_seconds == pytest.approx(10) and wait.down_seconds > 0
  alone = netsim.simulate(plan("local"), links, StepTimes((1.0,)), pauses=Interruptions(100, 50), rounds=2000)
  assert alone.compute_utilization == pytest.approx(100 / 150, rel=0.03)  # renewal: up 100 s, down 50 s


def test_weibull_gaps_keep_their_mean():
  rng = np.random.default_rng(0)
  for shape in (0.7, 1.0, 2.0):
    assert np.mean([Interruptions(100, 1, shape).gap(rng) for _ in range(20000)]) == pytest.approx(100, rel=0.05)


def test_jitter_keeps_the_mean_and_slows_barriers():
  """The mean of a worker's steps stays; a barrier waits for the slowest of 8."""
  for kind in ("lognormal", "gamma", "uniform"):
    times = parse_step_times("1", f"{kind}:0.3")
    assert times.draw(0, 0, 0, 200_000).mean() == pytest.approx(1, rel=0.01)
    assert times.draw(0, 0, 0, 200_000).std() == pytest.approx(0.3, rel=0.03)
  links = Links(np.full(M, GBIT))
  assert netsim.simulate(plan("data_parallel"), links, parse_step_times("1", "0.3"), rounds=50).round_seconds > 27.5 * 1.05


# --- goodput -------------------------------------------------------------------------------------------------------------


def test_goodput_closed_forms():
  """Rigid: up 1/F, down r, in turn. No failures: all of the time."""
  from fgd_jax.netsim.goodput import ChipFailures, simulate_goodput
  model = ChipFailures(restart=76)
  rate = 300_000 / (365.25 * 86400)
  assert simulate_goodput(1, 300_000, model, elastic=False).goodput == pytest.approx(1 / (1 + rate * 76), abs=0.01)
  assert simulate_goodput(1, 300_000, ChipFailures(mean_time=1e15)).goodput == pytest.approx(1)
  for learners in (1, 8):
    result = simulate_goodput(learners, 1_200_000)
    assert result.goodput == pytest.approx(result.closed_form, abs=0.02)
  assert simulate_goodput(8, 1_200_000, seed=1) == simulate_goodput(8, 1_200_000, seed=1)


def test_barriers_cost_goodput():
  """One learner waits for nobody; of two with stalls at different times, both lose what either loses."""
  from fgd_jax.netsim.goodput import _with_barriers, simulate_goodput
  one, barred = (simulate_goodput(1, 300_000, barrier=b).goodput for b in (0.0, 300.0))
  assert barred == pytest.approx(one, rel=1e-9)
  free, short, long = (simulate_goodput(8, 1_200_000, barrier=b).goodput for b in (0.0, 100.0, 3600.0))
  assert short < long < free
  stalls = [np.array([[10.0, 15.0]]), np.array([[40.0, 42.0], [70.0, 71.0]])]
  assert _with_barriers(stalls, 100.0, 20.0) == pytest.approx(100 - 5 - 2 - 1)
  assert _with_barriers([s[:1] for s in stalls], 100.0, 100.0) == pytest.approx(95)  # one round: the slower one


def test_goodput_rule_of_thumb_uptime_and_scale(capsys):
  """M learners on N chips are as good as one on N/M (8.6); uptime about 100 % for M >= 4; 2.4M chips are cheap."""
  import time
  one, eight = (printed(capsys, "goodput", f"--learners={m}", f"--chips={150_000 * m}") for m in (1, 8))
  assert eight["goodput"] == pytest.approx(one["goodput"], abs=0.01)
  assert printed(capsys, "goodput", "--learners=4", "--chips=1200000")["uptime"] > 0.99
  began = time.monotonic()
  got = printed(capsys, "goodput", "--learners=8", "--chips=2400000", "--shape=0.7")
  assert time.monotonic() - began < 30 and 0 < got["goodput"] < 1


# --- byte counts and the command -----------------------------------------------------------------------------------------


def test_bytes_of_a_config_are_those_the_round_counts(capsys):
  """Subset by path: embedding, head and two layers of the 1.5B Llama in float32 (tests/test_config.py counts them)."""
  got = printed(capsys, "utilization", f"--config={ROOT}/configs/llama_1p5b.py", "--step-seconds=4.7", "--bandwidth=200Mbps")
  layer = 2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192 + 2 * 2048
  total = 2 * 128_256 * 2048 + 16 * layer + 2048
  assert got["params"] == total and got["workers"] == 8 and got["inner_steps"] == 100
  assert got["bytes_overlapped"] == pytest.approx(2 * 7 / 8 * 4 * total)
  assert got["bytes_blocking"] == pytest.approx(4 * (2 * 128_256 * 2048 + 2 * layer))
  several = printed(capsys, "utilization", f"--config={ROOT}/configs/llama_1p5b.py:workers=4", "--method=diloco,GlobalM1",
                    "--step-seconds=4.7", "--bandwidth=200Mbps")["results"]
  coded = printed(capsys, "utilization", f"--config={ROOT}/configs/llama_1p5b.py:workers=4,method.codec=bf16",
                  "--method=gasloc", "--step-seconds=4.7", "--bandwidth=200Mbps")
  assert coded["bytes_blocking"] == 2 * total
  assert [(r["bytes_overlapped"], r["bytes_blocking"]) for r in several] == [(0, 6.0 * total), (6.0 * total, 0)]


def test_bits_and_codecs(capsys):
  """A payload of bits/8 bytes a parameter; int8 has a float32 scale for each 256 values."""
  words = ["utilization", "--method=gasloc", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps"]
  sent = lambda *more: printed(capsys, *words, *more)["bytes_blocking"]
  assert sent() == 2e9 and sent("--bytes-per-param=4") == 4e9 and sent("--bits-per-param=4") == 0.5e9
  assert sent("--codec=int8") == pytest.approx(1e9 * (1 + 4 / 256)) and sent("--codec=e3m0") == pytest.approx(
      1e9 * (0.5 + 4 / 256)) and sent("--codec=bf16", "--bytes-per-param=4") == 2e9


def test_the_commands_json_and_picture(capsys, tmp_path):
  words = ("utilization", "--params=1.498e9", "--bytes-per-param=2", "--workers=8", "--inner-steps=100",
           "--step-seconds=2.35")
  one = printed(capsys, *words, "--method=GlobalM1LocalM2", "--bandwidth=100Mbps")
  assert one["compute_utilization"] == pytest.approx(0.36, abs=0.01) == one["closed_form_utilization"]
  assert one["round_seconds"] == pytest.approx(one["compute_seconds"] + one["stall_seconds"])
  assert one["bytes_overlapped"] == pytest.approx(1.75 * 2 * 1.498e9) and one["bytes_blocking"] == pytest.approx(2 * 1.498e9)
  assert {s["what"] for s in one["timeline"]} >= {"compute", "wait", "mix1", "mix2"}
  picture = tmp_path / "u.png"
  several = printed(capsys, *words, "--method=diloco,LocalM1M2", "--bandwidth=100Mbps,1Gbps", f"--plot={picture}")["results"]
  assert [(r["method"], r["bandwidth"]) for r in several] == [
      ("diloco", "100Mbps"), ("diloco", "1Gbps"), ("LocalM1M2", "100Mbps"), ("LocalM1M2", "1Gbps")]
  assert picture.stat().st_size > 5000
  run(*words, "--method=LocalM1M2", "--bandwidth=100Mbps", "--drop=0.05")
  text = capsys.readouterr().out
  assert "closed form" in text and "# inner steps" in text and "kept their own value" in text
  layered = printed(capsys, *words, "--method=data_parallel", "--bandwidth=100Gbps", "--layers=16")
  assert layered["compute_utilization"] == pytest.approx(data_parallel_utilization(16, 2.35, 1.75 * 16 * 1.498e9, 1e11))


def test_recommend(capsys):
  """Compute 2 s a step; a mean of 42 s at 1 Gbit/s hides behind 21 steps or more, half of it behind 10."""
  got = printed(capsys, "recommend", "--bandwidth=1Gbps", "--params=1.5e9", "--step-seconds=2", "--target=0.99")
  rows = {r["method"]: r for r in got["methods"]}
  assert rows["GlobalM1"]["inner_steps"] == 50 and got["recommended"] in ("GlobalM1", "eager_diloco", "pipelined_diloco")
  assert not rows["data_parallel"]["reaches_target"] and rows["diloco"]["inner_steps"] >= 0.99 * 42 / (0.01 * 2)


@pytest.mark.parametrize("text, bits", [("100Mbps", 1e8), ("1.5Gbit/s", 1.5e9), ("25GB/s", 2e11), ("10kbps", 1e4),
                                        ("1e9", 1e9), ("200 Mb/s", 2e8)])
def test_bandwidths(text, bits):
  assert parse_bandwidth(text) == pytest.approx(bits)


@pytest.mark.parametrize("words, says", [
    (["utilization", "--step-seconds=1", "--bandwidth=1Gbps"], "params is missing"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=quick"], "bandwidth='quick'"),
    (["utilization", "--params=1e9", "--step-seconds=0", "--bandwidth=1Gbps"], "step_seconds='0'"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps", "--method=GlobalM3"], "did you mean"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps", "--drop=1"], "drop=1"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps;2Gbps"], "2 rates for 8 workers"),
    (["utilization", "--params=1e9", "--step-seconds=1;2", "--bandwidth=1Gbps"], "2 values for 8 workers"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps", "--subset-share=2"], "subset_share=2"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps", "--crash-every=9"], "crash_seconds"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps", "--layers=4"], "GlobalM1LocalM2"),
    (["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps", "--method=streaming_diloco", "--fragments=3"],
     "must divide"),
    (["utilization", "--config=nowhere.py", "--step-seconds=1", "--bandwidth=1Gbps"], "nowhere.py"),
    (["utilization", "--config=nowhere.py", "--workers=3", "--step-seconds=1", "--bandwidth=1Gbps"], "comes from the conf"),
    (["table", "nothing"], "invalid choice"), (["goodput", "--chips=3"], "chips=3"),
    (["goodput", "--chip-years=0"], "mean_time=0"),
    (["recommend", "--bandwidth=1Gbps", "--step-seconds=1"], "params is missing"),
    ([], "required")])
def test_errors_are_one_sentence(capsys, words, says):
  with pytest.raises(SystemExit) as stopped:
    run(*words)
  out, err = capsys.readouterr()
  assert stopped.value.code == 2 and not out
  assert says in err and err.startswith("Error: ") and err.count("\n") == 1 and re.search(r"\.\n$", err)


def test_the_module_runs():
  done = subprocess.run([sys.executable, "-m", "fgd_jax.netsim", "--help"], capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0 and "utilization" in done.stdout and "goodput" in done.stdout
