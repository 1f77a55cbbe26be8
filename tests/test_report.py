"""The report: one page that needs nothing else, means over seeds, simulated time, and folders that are not well."""

import base64
import html.parser
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from fgd_jax.config import flat
from fgd_jax.default_config import get_config
from fgd_jax.report import __main__ as command
from fgd_jax.report import groups, hours, runs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROUNDS, TOKENS = 12, 4 * 20 * 4 * 128
LEVELS = {"diloco": 2.0, "GlobalM1LocalM2": 1.9, "streaming_diloco": 2.1}


def loss_of(method, seed, r):
  return LEVELS[method] + 2.0 * np.exp(-r / 4) + 0.05 * seed


def write_run(folder, method, seed, rounds=ROUNDS, words="", events=()):
  """A run as training writes it, with figures by formula."""
  os.makedirs(folder)
  config = flat(get_config(f"rounds={ROUNDS},seed={seed},method={method},data.source=synthetic{words}"))
  with open(os.path.join(folder, "config.json"), "w") as f:
    json.dump(config, f)
  with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
    for r in range(1, rounds + 1):
      record = {"round": r, "step": 20 * r, "tokens": TOKENS * r, "train_loss": loss_of(method, seed, r) + 0.1,
                "bytes_overlapped": 0.0 if method == "diloco" else 3e6, "bytes_blocking": 3e6,
                "tokens_per_second": None if r == 1 else TOKENS / 10}  # a round of 20 steps takes 10 s
      if r % 3 == 0:
        record |= {"eval_loss": loss_of(method, seed, r), "eval_loss_workers": loss_of(method, seed, r) + 0.02,
                   "consensus_l2": 5 / r, "js_distance": 0.3 / r,
                   "consensus_blocks": {"embed": 9 / r**2, "layers_0": 12 / r**2, "lm_head": 4 / r**2}}
      f.write(json.dumps(record) + "\n")
  if events:
    with open(os.path.join(folder, "events.jsonl"), "w") as f:
      f.writelines(json.dumps(e) + "\n" for e in events)


@pytest.fixture(scope="module")
def some_runs(tmp_path_factory):
  """Two methods with two seeds, one of them with events; one unfinished, one empty, two damaged."""
  folder = tmp_path_factory.mktemp("runs")
  for method in ("diloco", "GlobalM1LocalM2"):
    for seed in (1, 2):
      write_run(folder / f"{method}-{seed}", method, seed, events=(
          {"round": 3, "step": 60, "event": "drop", "worker": 1}, {"round": 7, "event": "crash", "worker": 2},
          {"round": 9, "event": "<b>odd</b>", "worker": 2}) if method == "diloco" and seed == 2 else ())
  write_run(folder / "diloco-3 <i>&", "diloco", 3, rounds=4)
  write_run(folder / "empty", "diloco", 4, rounds=0)
  os.makedirs(folder / "no-config")
  (folder / "no-config" / "metrics.jsonl").write_text('{"round": 1}\n')
  write_run(folder / "damaged", "diloco", 5)
  (folder / "damaged" / "metrics.jsonl").write_text('{"round": 1}\nnonsense\n{"round": 2}\n')
  return folder


def parameters():
  """Of the default model on 64 tokens, by hand: 2 layers of dim 128, 2 of 4 heads for keys and values, ffn 352."""
  layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128
  return 2 * 64 * 128 + 2 * layer + 128


class Page(html.parser.HTMLParser):
  """Collects tags with attributes, text, and refuses unbalanced tags."""

  void = {"meta", "img", "br", "link", "hr", "input"}

  def __init__(self, text):
    super().__init__()
    self.tags, self.texts, self.stack = [], [], []
    self.feed(text)
    assert not self.stack

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in self.void:
      self.stack.append(tag)

  def handle_endtag(self, tag):
    assert self.stack.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)


@pytest.fixture(scope="module")
def made(some_runs, tmp_path_factory):
  out = str(tmp_path_factory.mktemp("out") / "report.html")
  result = command.make([str(some_runs)], out, ["1Mbps", "100Mbps"], 0.5)
  with open(out, encoding="utf-8") as f:
    return result, f.read(), os.path.dirname(out)


def test_page_has_all_figures_and_needs_nothing_else(made):
  result, text, folder = made
  page = Page(text)
  images = [a for tag, a in page.tags if tag == "img"]
  names = [os.path.splitext(os.path.basename(path))[0] for path in result["figures"]]
  assert names == ["loss_tokens", "loss_hours", "disagreement", "consensus_blocks", "bytes", "utilization", "events"]
  assert len(images) == len(names) and all(a["alt"] for a in images)
  for path, image in zip(result["figures"], images):
    png = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"), validate=True)
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and png == open(path, "rb").read()
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    assert width > 900 and 150 < height < 4 * width
  outside = [a for _, a in page.tags for k, v in a.items() if k in ("src", "href") and not v.startswith(("data:", "#"))]
  assert not outside and not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
  assert "url(" not in text and "@import" not in text and os.listdir(folder) == ["report.html", "report_figures"]
  anchors = {a["id"] for _, a in page.tags if "id" in a}
  assert {a["href"][1:] for tag, a in page.tags if tag == "a"} <= anchors


def test_tables_say_what_each_folder_is(made):
  result, text, _ = made
  status = {r["name"]: r["status"] for r in result["runs"]}
  assert status["diloco-1"] == "finished" and status["diloco-3 <i>&"] == f"round 4 of {ROUNDS}"
  assert status["empty"] == "No round is recorded yet." and "damaged in line 2" in status["damaged"]
  assert "config.json is missing" in status["no-config"]
  joined = "".join(Page(text).texts)
  for sentence in status.values():
    assert sentence in joined
  assert "<i>" not in text and "<b>odd" not in text and "diloco-3 <i>&" in joined and "<b>odd</b>" in joined  # escaped


def test_means_and_deviations_over_seeds(made):
  rows = {row["method"]: row for row in made[0]["methods"]}
  assert set(rows) == {"diloco", "GlobalM1LocalM2"}
  final = [loss_of("diloco", seed, 12) for seed in (1, 2)]  # the unfinished run is not in the mean
  assert rows["diloco"]["eval_loss"] == pytest.approx(np.mean(final))
  assert rows["diloco"]["eval_loss_deviation"] == pytest.approx(0.05 / np.sqrt(2))  # of two: half the difference x sqrt 2
  assert rows["diloco"]["runs"] == 2 and rows["diloco"]["unfinished"] == 1
  assert f"{np.mean(final):.4f} ± {0.05 / np.sqrt(2):.4f}" in made[1]


def test_curve_takes_the_rounds_that_all_have(some_runs):
  found = [runs.read(str(some_runs / name), name) for name in ("diloco-1", "diloco-2", "diloco-3 <i>&")]
  curve = groups.curve(found, groups.key("tokens"), groups.key("eval_loss"))
  assert curve.x.tolist() == [3 * TOKENS] and curve.runs == 3
  np.testing.assert_allclose(curve.mean, [loss_of("diloco", 2, 3)])
  np.testing.assert_allclose(curve.deviation, [0.05])  # 1, 2, 3 times 0.05: standard deviation 0.05
  assert groups.curve(found, groups.key("tokens"), groups.key("nothing")) is None


def test_simulated_time_is_the_closed_form(some_runs):
  """DiLoCo computes, then waits for its all-reduce of 2 (M-1)/M parameters of 4 bytes: H s + 8 bytes / rate."""
  found = groups.group([runs.read(str(some_runs / "diloco-1"), "a")])[0]
  pace = hours.pace(found, "1Mbps", 0.5)
  expected = 20 * 0.5 + 8 * 1.5 * 4 * parameters() / 1e6
  assert pace.round_seconds == pytest.approx(expected, rel=1e-6)
  assert pace.compute_utilization == pytest.approx(10 / expected, rel=1e-6)
  assert hours.measured_step_seconds(found.runs) == pytest.approx(0.5)


def test_overlap_shows_in_hours_and_utilisation(made):
  rows = {row["method"]: row["simulated"]["1Mbps"] for row in made[0]["methods"]}
  fgd, payload = rows["GlobalM1LocalM2"], 8 * 4 * parameters() / 1e6  # seconds to send the parameters once: about 13
  assert fgd["round_seconds"] == pytest.approx(1.5 * payload + payload, rel=0.05)  # Mix1 hides computing; Mix2 blocks
  assert rows["diloco"]["round_seconds"] == pytest.approx(10 + 1.5 * payload)
  assert fgd["hours"] == pytest.approx(fgd["round_seconds"] * ROUNDS / 3600)


def test_labels_name_what_differs(tmp_path):
  for i, words in enumerate(("", ",inner_steps=10", ",method.codec=int8", ",checkpoint_every=3")):
    write_run(tmp_path / str(i), "diloco", i, words=words)
  found = runs.find([str(tmp_path)])
  assert groups.differing(found) == ["inner_steps", "method.codec"]
  assert [(g.label, len(g.runs)) for g in groups.group(found)] == [
      ("diloco, inner_steps=20, codec=None", 2), ("diloco, inner_steps=10, codec=None", 1),
      ("diloco, inner_steps=20, codec=int8", 1)]


def test_recorded_network_is_shown(tmp_path):
  write_run(tmp_path / "a", "diloco", 1)
  path = tmp_path / "a" / "metrics.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  path.write_text("".join(json.dumps(r | {"simulated_seconds": 50.0 * r["round"], "compute_utilization": 0.4,
                                           "failed_exchanges": r["round"] % 2, "workers_alive": 3}) + "\n" for r in lines))
  result = command.make([str(tmp_path)], str(tmp_path / "r.html"), ["1Gbps"], 1.0)
  assert any(path.endswith("recorded_time.png") for path in result["figures"])


def test_runs_that_cannot_be_simulated_get_a_note(tmp_path):
  write_run(tmp_path / "a", "diloco", 1)
  config = json.loads((tmp_path / "a" / "config.json").read_text())
  (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"model.of_the_future": 3}))
  result = command.make([str(tmp_path)], str(tmp_path / "r.html"), ["1Gbps"], 1.0)
  assert any("model.of_the_future" in note for note in result["notes"]) and result["methods"][0]["simulated"] == {}


@pytest.mark.parametrize("arguments, words", [
    (["missing"], "is not a folder"), (["."], "holds no run"), (["runs", "--bandwidth=fast"], "fast"),
    (["runs", "--step-seconds=-1"], "--step-seconds=-1"), (["runs", "--out=thesis.html"], "is no report of this command"),
    (["runs", "--out=runs"], "is a folder")])
def test_bad_input_gets_one_sentence(arguments, words, tmp_path, monkeypatch):
  (tmp_path / "cwd").mkdir()
  monkeypatch.chdir(tmp_path / "cwd")
  if arguments[0] == "runs":
    write_run("runs/a", "diloco", 1, rounds=1)
  (tmp_path / "cwd" / "thesis.html").write_text("<p>mine</p>")
  with pytest.raises(SystemExit) as e:
    command.main(arguments)
  assert str(e.value).startswith("error: ") and words in str(e.value) and "\n" not in str(e.value)
  assert (tmp_path / "cwd" / "thesis.html").read_text() == "<p>mine</p>"


def test_command_writes_and_replaces_its_report(tmp_path):
  write_run(tmp_path / "runs" / "a", "diloco", 1)
  out = str(tmp_path / "deep" / "report.html")
  run = [sys.executable, "-m", "fgd_jax.report", str(tmp_path / "runs"), f"--out={out}", "--bandwidth=1Gbps", "--json"]
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  for _ in range(2):
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
  result = json.loads(done.stdout)
  assert result["step_seconds"] == pytest.approx(0.5) and result["methods"][0]["tokens"] == ROUNDS * TOKENS
  seconds = 10 + 8 * 1.5 * 4 * parameters() / 1e9
  assert result["methods"][0]["simulated"]["1Gbps"]["round_seconds"] == pytest.approx(seconds)


def test_decoupled_runs_are_named_once_and_not_simulated(tmp_path):
  for seed in (1, 2):
    write_run(tmp_path / f"d{seed}", "diloco", seed, words=f",steps={ROUNDS},decoupled.fragments={seed}")
    os.makedirs(tmp_path / f"d{seed}" / "syncer")
  result = command.make([str(tmp_path)], str(tmp_path / "report.html"), ["1Mbps"], 0.5)
  assert result["notes"] == ["Decoupled runs are not simulated here."]
  assert [row["method"] for row in result["methods"]] == [
      f"decoupled, decoupled.fragments={seed}" for seed in (1, 2)]
  assert all(row["simulated"] == {} for row in result["methods"])


def test_a_number_of_workers_that_changed_is_shown(tmp_path):
  events = [{"round": 3, "event": "workers", "before": 8, "now": 4}, {"round": 5, "event": "crash", "worker": 2},
            {"round": 7, "event": "workers", "before": 4, "now": 3}]
  write_run(tmp_path / "a", "diloco", 1, words=",workers=3", events=events)
  write_run(tmp_path / "b", "diloco", 1, words=",workers=2")
  result = command.make([str(tmp_path)], str(tmp_path / "report.html"), ["1Mbps"], 0.5)
  assert [row["workers"] for row in result["methods"]] == ["8, then 4, then 3", 2]
  assert (tmp_path / "report.html").read_text().count(">8, then 4, then 3<") == 2  # of methods, of runs
