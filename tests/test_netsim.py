"""The network simulator: published tables, closed forms against events, failures, uneven links and workers.

Published figures: methods-core.md 2.4 (arXiv 2501.18512) and 4.6 (2606.22768), as read in those papers or in summaries of
them; everything else here is algebra.
"""

import math

import numpy as np
import pytest
from references import layered_data_parallel

from fgd_jax import methods, netsim
from fgd_jax.netsim import closed, published
from fgd_jax.netsim.events import Network, Simulator
from fgd_jax.netsim.failures import Drops, Interruptions, StepTimes, parse_step_times
from fgd_jax.netsim.layers import Layered, step_graph
from fgd_jax.netsim.links import Links, cost, read_links

GBIT = 1e9
# M = 8, H = 10, S = 1 Gbit: at 1 Gbit/s a ring all-reduce takes 1.75 s, a swap 1 s.
M, H, PARAMS = 8, 10, 1e9 / 16


def plan(method, workers=M, steps=H, **kw):
  return netsim.make_plan(method, PARAMS, 16, workers, steps, **kw)


def round_of(method, rate=GBIT, step=1.0, workers=M, steps=H, latency=0.0, **kw):
  """Seconds of a simulated round on equal links."""
  links = Links(np.full(workers, rate), latency)
  return netsim.simulate(plan(method, workers, steps, **kw), links, StepTimes((step,)), rounds=2).round_seconds


# --- published tables ----------------------------------------------------------------------------------------------------


def test_fgd_table(printed):
  """The seven published utilisations, each within 1 point, from one free number (the step time)."""
  cells = {(c["row"], c["column"]): c["simulated"] for c in printed("table", "fgd")["cells"]}
  wanted = {("diloco", "100Mbps"): 36, ("diloco", "200Mbps"): 53, ("GlobalM1", "100Mbps"): 56, ("GlobalM1", "200Mbps"): 100,
            ("GlobalM1LocalM2", "100Mbps"): 36, ("GlobalM1LocalM2", "200Mbps"): 66,
            ("GlobalM1LocalM2-subset", "100Mbps"): 45}
  assert cells.keys() == wanted.keys()
  for key, value in wanted.items():
    assert abs(cells[key] - value) <= 1, key


def test_data_parallel_in_the_fgd_setting_is_about_one_percent(printed):
  got = printed("utilization", "--method=data_parallel", "--params=1.498e9", "--step-seconds=2.35",
                "--bandwidth=100Mbps,200Mbps")["results"]
  assert [round(100 * r["compute_utilization"], 1) for r in got] == [0.6, 1.1]


def test_streaming_table(printed):
  """At least 80 % of the 25 published cells within one step of the grid of which they are values."""
  wanted = {"data_parallel": [86.8, 152.6, 184.2, 222.3, 569.0], "diloco": [1.4, 6.2, 13.3, 23.3, 86.8],
            "streaming": [1.4, 5.2, 9.1, 16.0, 28.1], "streaming_overlap": [1.4, 4.3, 6.2, 9.1, 11.0],
            "streaming_overlap_fp4": [0.4, 0.9, 1.7, 2.0, 3.0]}
  got = printed("table", "streaming", "--size=1B")
  assert got.keys() == wanted.keys()
  ratio = 10 ** (4 / 49)
  near = [abs(math.log(a / b) / math.log(ratio)) < 1.3 for m in wanted for a, b in zip(got[m], wanted[m])]  # 0.3: rounding
  assert len(near) == 25 and sum(near) >= 20


def test_streaming_table_with_16_bits():
  """No fitted number: every cell within one step of the grid, none below."""
  steps = [published.grid_steps(c.published, c.simulated) for c in published.streaming_cells("1B", bits=16)]
  assert len(steps) == 25 and set(steps) == {0, 1} and steps.count(1) == 22


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


def test_failures_table(printed):
  """DiLoCo repeats what failed; FGD's pairs and skipped means cost it no time (4.7)."""
  rows = {r["method"]: r for r in printed("table", "failures", "--drop=0.05")["rows"]}
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
  net.send(["link"], 10).then(lambda: ends.update(long=sim.now))
  net.send(["link"], 4).then(lambda: ends.update(short=sim.now))
  gone = net.send(["link"], 4, latency=5)
  gone.then(lambda: ends.update(gone=sim.now))
  sim.at(5.0, lambda: net.cancel(gone), late=True)
  sim.run()
  assert ends == {"short": pytest.approx(4), "long": pytest.approx(7)}


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
  assert got == pytest.approx(layered_data_parallel(layers, 0.1, 16e9, rate), rel=1e-9)


@pytest.mark.parametrize("layers, steps, fragments, delay, load", [
    (4, 10, 2, 3, 1.08), (3, 6, 3, 2, 1.02), (6, 12, 4, 3, 0.97), (2, 4, 0, 2, 1.3), (5, 7, 1, 6, 1.01),
    (6, 9, 5, 1, 0.8)])
def test_layers_in_the_steady_state(layers, steps, fragments, delay, load):
  """500 cycles of the same rules, written as recurrences: a link a little too slow makes the chips wait in the end."""
  cycle = steps if fragments else 1
  bits, rate = 1e9, 1e9 / (cycle * 0.1 * load)  # the link is busy for `load` of the compute time
  chips, link, there, marks = 0.0, 0.0, {}, []
  for t in range(500 * cycle):
    marks += [chips] if t % cycle == 0 else []
    chips = max(chips, there.pop(t, 0.0))
    due = [l for l in range(layers) if not fragments or any(
        (p + 1) * steps // fragments - 1 == t % cycle and l % fragments == p for p in range(fragments))]
    for l in reversed(due):  # L forward nodes; activations and weights from the last layer on, of the first weights alone
      nodes = layers + 2 * (layers - l) - (l == 0)
      link = max(link, chips + nodes * 0.1 / (3 * layers - 1)) + bits / layers / rate
    chips += 0.1
    if due:
      there[t + 1 + delay] = link
  wanted = 250 * cycle * 0.1 / (marks[-1] - marks[-251])
  got = Layered(layers, 0.1, bits, steps, fragments, delay).utilization(rate)
  assert got == pytest.approx(wanted, rel=1e-6) and got <= min(1, 1 / load) + 1e-9


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


@pytest.mark.parametrize("drops, unknown", [
    (Drops(0.3), ()), (Drops(0.1, "link", late_mix1="wait"), ()), (Drops(0.4, late_mix1="wait"), ()),
    (Drops(0.3, "round", late_mix1="wait"), ("GlobalM1LocalM2", "LocalM1M2", "streaming_diloco")),
    (Drops(0.4, at="uniform"), ("GlobalM1LocalM2", "LocalM1M2"))])
@pytest.mark.parametrize("method", ["GlobalM1", "GlobalM1LocalM2", "LocalM1M2", "data_parallel", "streaming_diloco"])
def test_closed_form_equals_events_with_failures(method, drops, unknown):
  """The long-run mean of the simulated rounds, means of 2.9 s in 10 s of compute; None where exchanges fail together, or at
  any point and the longest of several counts."""
  p, links = plan(method, options={"fragments": 5} if "streaming" in method else None), Links(np.full(M, 0.6 * GBIT))
  wanted = closed.round_seconds(p, links, 1.0, drops)
  assert (wanted is None) == (method in unknown)
  if wanted is not None:
    assert netsim.simulate(p, links, StepTimes((1.0,)), drops, rounds=400).round_seconds == pytest.approx(wanted, rel=0.025)


def test_no_closed_form_where_late_exchanges_use_links_by_pair():
  """Mix1 needs 17.5 s of the ring's edges, Mix2 10 s of its pairs' edges, of which the ring has some: no simple sum."""
  rates = np.full((M, M), GBIT / 10)
  p = plan("GlobalM1LocalM2")
  assert closed.round_seconds(p, Links(rates), 1.0) is None
  simulated = netsim.simulate(p, Links(rates), StepTimes((1.0,)), rounds=3).round_seconds
  assert 20 <= simulated < 27.5 - 1  # an edge that is not shared carries Mix2 beside the rest of Mix1
  for method in ("diloco", "GlobalM1", "gasloc"):  # nothing is shared
    wanted = closed.round_seconds(plan(method), Links(rates), 1.0)
    assert netsim.simulate(plan(method), Links(rates), StepTimes((1.0,)), rounds=3).round_seconds == pytest.approx(wanted)
  assert closed.round_seconds(p, Links(10 * rates), 1.0) == pytest.approx(11)  # in time
  assert closed.round_seconds(p, Links(10 * rates), 1.0, Drops(0.1, late_mix1="wait")) is None


def test_a_swap_fails_with_either_link():
  """Unit "link": 1 - (1-p)^2 of the swaps fail, 1 - (1-p)^8 of the means; "message": p of both."""
  swaps = lambda drops: netsim.simulate(plan("gasloc"), Links(np.full(M, GBIT)), StepTimes((1.0,)), drops, rounds=1500)
  for drops, p in ((Drops(0.3, "link"), 1 - 0.7**2), (Drops(0.3), 0.3)):
    assert swaps(drops).lost_pairs == pytest.approx(4 * p, abs=0.08)  # four pairs; the standard error is 0.026


def test_a_skipped_mean_leaves_the_link_to_mix2():
  """The mean (7 s) fails for certain at 7 s, its repetition is cancelled at 10 s: Mix2 has the link alone (4 s)."""
  result = netsim.simulate(plan("GlobalM1LocalM2"), Links(np.full(M, 0.25 * GBIT)), StepTimes((1.0,)), Drops(0.999999),
                           rounds=3)
  assert result.round_seconds == pytest.approx(14) and result.skipped == 1 and result.lost_pairs == 4


def test_swaps_that_fail_are_counted_and_take_no_longer():
  """4.7: the time is spent, nothing is repeated."""
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
  p = plan("gasloc", 4)
  result = netsim.simulate(p, links, StepTimes((1.0,)), rounds=12)
  exchange, worker0 = p.exchanges[0], 0.0
  for r in range(12):  # 0 and 3 need 4 s for their swap, all others 1 s; pairs start when both are there
    partners = np.argmax(exchange.topology.matrix(r) - np.eye(4), axis=1)
    worker0 += partners[0] == 3
  assert 0 < worker0 < 12
  alone = netsim.simulate(p, links, StepTimes((1.0,)), rounds=1).round_ends[0]
  assert alone == pytest.approx(14 if np.argmax(exchange.topology.matrix(0) - np.eye(4), axis=1)[0] == 3 else 11)
  assert result.round_ends[-1] >= 12 * 11 + 3 * worker0 - 1e-9
  with pytest.raises(ValueError, match="5 lines of 5 rates"):
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
