"""The command: the run's folder, clear ends, and runs that are killed and continued bit for bit."""

import glob
import gzip
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from fgd_jax import config as configs
from fgd_jax import distributed
from fgd_jax import train as trainer
from fgd_jax.default_config import get_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ("rounds=4,inner_steps=2,workers=4,batch_size=2,seq_len=16,eval_every=2,eval_batches=2,eval_batch_size=4,"
        "measure_every=2,measure_sequences=2,checkpoint_every=1,inner.warmup_steps=2,model.dim=16,model.ffn_dim=24,"
        "model.layers=1,model.heads=2,model.kv_heads=1,data.source=synthetic")


def command(workdir, *options):
  return [sys.executable, "-m", "fgd_jax.train", f"--config=configs/default.py:{TINY}", f"--workdir={workdir}", *options]


def environment():
  """As a user's shell has it: without the test suite's eight devices."""
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}


def run(workdir, *options):
  return subprocess.run(command(workdir, *options), cwd=ROOT, env=environment(), capture_output=True, text=True,
                        timeout=600)


def lines(workdir):
  """metrics.jsonl without its timing field."""
  with open(os.path.join(workdir, "metrics.jsonl")) as f:
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in f]


def files_of(folder):
  return {os.path.relpath(p, folder): open(p, "rb").read() for p in glob.glob(f"{folder}/**", recursive=True)
          if os.path.isfile(p)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """One finished run and its summary."""
  workdir = str(tmp_path_factory.mktemp("run") / "a")
  return workdir, trainer.train(get_config(TINY), workdir)


def test_run_folder_has_all_keys(finished):
  workdir, summary = finished
  records = lines(workdir)
  assert [r["round"] for r in records] == [1, 2, 3, 4]
  assert [r["step"] for r in records] == [2, 4, 6, 8]
  assert [r["tokens"] for r in records] == [4 * 2 * 2 * 16 * r for r in (1, 2, 3, 4)]
  parameters = summary["parameters"] * 4  # float32 bytes
  for r in records:
    assert np.isfinite(r["train_loss"])
    assert r["bytes_overlapped"] == 2 * 3 / 4 * parameters and r["bytes_blocking"] == parameters
    evaluated = r["round"] % 2 == 0
    for key in ("eval_loss", "eval_perplexity", "eval_loss_workers", "consensus_l2", "consensus_inner",
                "consensus_outer", "consensus_blocks", "js_distance"):
      assert (key in r) == evaluated, key
    if evaluated:
      assert r["eval_perplexity"] == pytest.approx(np.exp(r["eval_loss"]))
      assert r["consensus_l2"] ** 2 == pytest.approx(r["consensus_inner"])
      assert sum(r["consensus_blocks"].values()) == pytest.approx(r["consensus_inner"], rel=1e-5)
      assert set(r["consensus_blocks"]) == {"embed", "layers_0", "final_norm", "lm_head"}
      assert 0 < r["js_distance"] < 1
  with open(os.path.join(workdir, "summary.json")) as f:
    assert json.load(f) == summary
  assert summary["eval_loss"] == records[-1]["eval_loss"] and summary["tokens"] == records[-1]["tokens"]
  with open(os.path.join(workdir, "config.json")) as f:
    assert json.load(f)["model.dim"] == 16
  assert open(os.path.join(workdir, "curves.png"), "rb").read(8) == b"\x89PNG\r\n\x1a\n"
  assert glob.glob(os.path.join(workdir, "tensorboard", "events*"))
  assert os.path.isdir(os.path.join(workdir, "checkpoints", "4"))


@pytest.mark.parametrize("name", ["streaming_diloco", "pipelined_diloco", "eager_diloco", "noloco", "gasloc", "isoloco"])
def test_methods_train_by_their_name(name, tmp_path):
  """configs/quickstart.py:method=NAME, on a small model; what it evaluates is finite and better than nothing."""
  config = runpy.run_path(os.path.join(ROOT, "configs", "quickstart.py"))["get_config"](
      TINY + f",method={name},inner_steps=4,rounds=2,inner.lr=1e-2,measure_every=0,checkpoint_every=0,mesh.worker=1")
  summary = trainer.train(config, str(tmp_path / "run"))
  assert 0 < summary["eval_loss"] < np.log(64) + 0.5 and summary["method"] == name
  assert summary["bytes_overlapped"] + summary["bytes_blocking"] > 0


def test_options_with_options_reach_the_method(tmp_path):
  config = get_config(TINY + ",method=diloco,method.codec=e3m0:stochastic=true")
  config.method.aggregator = "ties:drop=0.25"
  method = configs.make_method(config)
  assert method.aggregator == "ties" and method.aggregator_options == {"drop": 0.25}
  assert method.codec == ("e3m0", {"stochastic": True})
  patterns = configs.make_method(get_config(TINY + ",method=streaming_diloco,method.fragment_patterns=embed;."))
  assert patterns.fragments == ["embed", "."]
  assert configs.worker_weights(get_config(TINY + ",worker_weights=3;1;1;1")) == [3, 1, 1, 1]
  uneven = configs.make_method(get_config(TINY + ",method=gasloc,method.inner_steps=2;1;2;2"))
  assert uneven.inner_steps == (2, 1, 2, 2)
  for words, message in ((",method=streaming_diloco,method.fragments=3", "fragments=3 must divide"),
                         (",method=gasloc,method.inner_steps=2;3;2;2", "exceeds inner_steps=2"),
                         (",method=gasloc,method.inner_steps=2;x", "joined by ';'"),
                         (",method=noloco,method.alpha=0.9", "stability limit"),
                         (",worker_weights=1;2", "worker_weights=.*each of the 4 workers"),
                         (",method=diloco,method.codec=int9", "int9"),
                         (",method=diloco,method.delay=1", "no option 'delay'")):
    with pytest.raises(ValueError, match=message):
      configs.validate(get_config(TINY + words))


def test_profile_of_chosen_rounds(tmp_path):
  """A trace of rounds 2 and 3, in which the rounds have names; the run is the same without it and may be resumed so."""
  workdir = str(tmp_path / "p")
  trainer.train(get_config(TINY + ",profile=2-3"), workdir)
  (trace,) = glob.glob(os.path.join(workdir, "profile", "**", "perfetto_trace.json.gz"), recursive=True)
  with gzip.open(trace, "rt") as f:
    events = json.load(f)["traceEvents"]
  assert [e["args"]["step_num"] for e in events if e.get("name") == "round"] == ["2", "3"]
  assert trainer.train(get_config(TINY), workdir)["rounds"] == 4


def test_finished_run_says_so_and_changes_nothing(finished):
  workdir, _ = finished
  before = files_of(workdir)
  done = run(workdir)
  assert done.returncode == 0, done.stderr
  assert "is finished (4 rounds" in done.stderr and "Traceback" not in done.stderr
  assert files_of(workdir) == before


def test_other_config_in_the_folder_is_refused(finished):
  workdir, _ = finished
  before = files_of(workdir)
  other = run(workdir, "--config.inner.lr=0.5")
  assert other.returncode == 2
  assert "inner.lr=0.5 contradicts" in other.stderr and "Traceback" not in other.stderr
  assert files_of(workdir) == before


@pytest.mark.parametrize("options, words", [
    (["--config.workers=3", "--config.method.mix1=hypercube", "--config.method.name=fgd"], ["hypercube", "workers=3"]),
    (["--config.data.source=text", "--config.data.path=/nowhere/at/all"], ["/nowhere/at/all"]),
    (["--config.method.subset=no_such_layer"], ["subset", "no_such_layer"]),
    (["--config.modell.dim=3"], ["modell"]),
    (["--config.model.heads=3"], ["heads"]),
    (["--config.rounds=many"], ["rounds", "many"]),
    (["--config=configs/quickstat.py"], ["--config=configs/quickstat.py does not exist", "such as configs/quickstart.py"]),
    (["--config=configs/default.py:roundz=3"], ["Unknown config key 'roundz'; did you mean 'rounds'"]),
    (["--config=configs/default.py:metod=diloco"], ["Unknown config key 'metod'; did you mean 'method'?"]),
    (["--config.round=30"], ["Unknown config key 'round'; did you mean 'rounds'?"]),
    (["--config.method=diloco"], ["did you mean 'method.name'?"]),
    (["--workdir="], ["--workdir is missing; give the folder"]),
])
def test_bad_input_stops_at_start_with_a_sentence(options, words, tmp_path):
  done = run(str(tmp_path / "w"), *options)
  assert done.returncode != 0
  last = done.stderr.strip().splitlines()[-1]
  assert all(w in last for w in words), done.stderr
  assert not any(w in done.stderr + done.stdout for w in ("Traceback", "ValueError", "\\'", "flags:"))
  assert not os.path.exists(tmp_path / "w" / "metrics.jsonl")


def test_refused_data_leave_nothing_behind(tmp_path):
  with pytest.raises(FileNotFoundError, match="/nowhere/at/all"):
    trainer.train(get_config(TINY + ",data.source=text,data.path=/nowhere/at/all"), str(tmp_path / "runs" / "w"))
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize("module, words", [
    ("train", "--config is missing; usage: "), ("aot", "--config and --topology are missing"),
    ("data.tokenize", "--input and --output and --seq_len are missing")])
def test_help_is_no_failure_and_what_is_missing_is_named(module, words):
  start = lambda *options: subprocess.run([sys.executable, "-m", f"fgd_jax.{module}", *options], cwd=ROOT, env=environment(),
                                          capture_output=True, text=True, timeout=300)
  shown = start("--help")
  assert shown.returncode == 0 and words.split()[0] in shown.stdout and "(required)" in shown.stdout and not shown.stderr
  done = start()
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.startswith(words) and done.stderr.count("\n") == 1


def test_folder_with_other_files_is_not_touched(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  with pytest.raises(ValueError, match="thesis.tex"):
    trainer.train(get_config(TINY), str(tmp_path))
  assert os.listdir(tmp_path) == ["thesis.tex"]


def test_only_one_process_at_a_time_has_the_folder(tmp_path):
  with trainer.claimed(str(tmp_path)):
    with pytest.raises(ValueError, match="Another process is running"):
      trainer.train(get_config(TINY), str(tmp_path))
  assert not os.path.exists(tmp_path / "metrics.jsonl")


def copy_of(finished, tmp_path):
  return shutil.copytree(finished[0], tmp_path / "copy")


def test_damaged_records_stop_before_anything_is_rewritten(finished, tmp_path):
  workdir = copy_of(finished, tmp_path)
  os.remove(workdir / "summary.json")
  text = (workdir / "metrics.jsonl").read_text()
  (workdir / "metrics.jsonl").write_text(text[3:])
  with pytest.raises(ValueError, match="metrics.jsonl is damaged in line 1"):
    trainer.train(get_config(TINY), str(workdir))
  assert (workdir / "metrics.jsonl").read_text() == text[3:]
  (workdir / "metrics.jsonl").write_text(text + '{"round": 5, "st')  # a torn last line is left out
  assert trainer.train(get_config(TINY), str(workdir)) == finished[1]
  assert lines(workdir) == lines(finished[0])


@pytest.mark.parametrize("name, words", [
    ("config.json", "config.json is damaged"), ("summary.json", "summary.json is damaged"),
    ("metrics.jsonl", "lacks the record of round 4"), ("checkpoints", "is not a folder")])
def test_other_damage_gets_one_sentence(name, words, finished, tmp_path):
  workdir = copy_of(finished, tmp_path)
  if name == "checkpoints":
    shutil.rmtree(workdir / name)
  if name == "metrics.jsonl":
    os.remove(workdir / "summary.json")
  (workdir / name).write_text("")
  with pytest.raises(ValueError, match=words):
    trainer.train(get_config(TINY), str(workdir))


def test_lost_checkpoints_do_not_restart_the_run(finished, tmp_path):
  workdir = copy_of(finished, tmp_path)
  shutil.rmtree(workdir / "checkpoints")
  config = json.loads((workdir / "config.json").read_text()) | {"inner.schedule": "constant"}
  (workdir / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="checkpoints are gone"):
    trainer.train(get_config(TINY + ",inner.schedule=constant,rounds=5"), str(workdir))
  assert lines(workdir) == lines(finished[0])


def test_a_constant_schedule_can_be_extended_and_is_the_longer_run(tmp_path):
  c = TINY + ",inner.schedule=constant,inner.warmup_steps=50,eval_every=0,measure_every=0,rounds="
  trainer.train(get_config(c + "2"), str(tmp_path / "a"))
  trainer.train(get_config(c + "3"), str(tmp_path / "a"))
  trainer.train(get_config(c + "3"), str(tmp_path / "b"))
  assert [r["train_loss"] for r in lines(tmp_path / "a")] == [r["train_loss"] for r in lines(tmp_path / "b")]
  assert lines(tmp_path / "a")[-1] == lines(tmp_path / "b")[-1]


def test_more_workers_than_data_is_refused(tmp_path):
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "a.txt").write_text("a short story " * 40)
  c = get_config(TINY + ",workers=64")
  c.data.source, c.data.path = "text", str(tmp_path / "text")
  with pytest.raises(ValueError, match="64"):
    trainer.train(c, str(tmp_path / "w"))


def test_non_finite_loss_names_worker_and_step_and_keeps_the_last_good_checkpoint(tmp_path):
  workdir = str(tmp_path / "w")
  c = get_config(TINY + ",rounds=6,inner.clip=0,inner.schedule=constant,inner.weight_decay=0,inner.warmup_steps=0,"
                 "checkpoint_every=2,inner.lr=1e18")
  with pytest.raises(trainer.NonFiniteError, match=r"Worker \d+ has (loss|non-finite parameters)") as e:
    trainer.train(c, workdir)
  assert "step" in str(e.value)
  for kept in os.listdir(os.path.join(workdir, "checkpoints")):
    assert int(kept) < 6


def test_gradient_accumulation_trains_alike(tmp_path, finished):
  _, summary = finished
  accumulated = trainer.train(get_config(TINY + ",accumulate=2"), str(tmp_path / "accumulated"))
  assert accumulated["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-4)


def started_until(process, words):
  """Reads stderr up to a line with these words."""
  for line in process.stderr:
    if words in line:
      return
  raise AssertionError(f"it ended without {words!r}")


def test_ctrl_c_ends_at_once_before_the_rounds_and_then_saves(tmp_path):
  """Before the rounds it leaves a folder that takes any config; in a round it saves it; and says what comes next."""
  workdir = str(tmp_path / "w")
  options = ["--config.rounds=30000", "--config.measure_every=0", "--config.eval_every=0", "--config.checkpoint_every=0"]
  start = lambda: subprocess.Popen(command(workdir, *options), cwd=ROOT, env=environment(), stderr=subprocess.PIPE,
                                   text=True)
  process = start()
  started_until(process, "Compiling")
  process.send_signal(signal.SIGINT)
  errors = process.communicate(timeout=60)[1]
  assert process.returncode == 130 and "Traceback" not in errors
  assert errors.endswith("Ended at once (Ctrl-C). There is no checkpoint, so the same command starts from the beginning.\n")

  options[0] = "--config.rounds=29000"  # nothing was trained, so nothing is contradicted
  process = start()
  started_until(process, "29000 rounds")
  until = time.time() + 300
  while not (os.path.exists(f"{workdir}/metrics.jsonl") and os.path.getsize(f"{workdir}/metrics.jsonl")):
    assert time.time() < until
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  errors = process.communicate(timeout=120)[1]
  done = lines(workdir)[-1]["round"]
  assert process.returncode == 130 and "Traceback" not in errors and "told again, it ends at once" in errors
  assert os.listdir(f"{workdir}/checkpoints") == [str(done)]
  assert f"Told to stop (Ctrl-C) after round {done}. The same command goes on from the checkpoint of round {done}." in errors
  refused = run(workdir, "--config.rounds=28000", *options[1:])
  assert refused.returncode == 2 and "rounds=28000 contradicts" in refused.stderr


def test_a_second_ctrl_c_ends_a_round_that_hangs():
  program = ("import time\nfrom fgd_jax import distributed\ndistributed.heed_signals(lambda: 'Words.')\n"
             "distributed.preempted(0)\nprint('ready', flush=True)\n"
             "time.sleep(600)\n")
  process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGINT)
  process.send_signal(signal.SIGINT)  # as timeout(1) does with its signal, whose two count as one
  started_until(process, "Told to stop (Ctrl-C)")
  time.sleep(distributed.AT_ONCE + 0.2)
  assert process.poll() is None
  process.send_signal(signal.SIGINT)
  assert process.communicate(timeout=20)[1].endswith("Ended at once (Ctrl-C). Words.\n") and process.returncode == 130


@pytest.mark.parametrize("method", ["GlobalM1LocalM2", "data_parallel"])
def test_killed_runs_continue_bit_for_bit(method, tmp_path):
  """Killed in mid-round (SIGKILL; or SIGTERM, which saves first) and during a save, then the same command: the same metrics
  and the same final state."""
  options = [f"--config.method.name={method}", "--config.rounds=30", "--config.measure_every=0"]
  whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
  reference = run(whole, *options)
  assert reference.returncode == 0, reference.stderr
  metrics = os.path.join(broken, "metrics.jsonl")

  def kill_when(ready, how=signal.SIGKILL):
    process = subprocess.Popen(command(broken, *options), cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    until = time.time() + 300
    while not ready() and process.poll() is None and time.time() < until:
      time.sleep(0.001)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(how)
    return process.wait()

  how = signal.SIGKILL if method == "GlobalM1LocalM2" else signal.SIGTERM
  status = kill_when(lambda: os.path.exists(metrics) and len(open(metrics).readlines()) >= 5, how)  # in mid-round
  if how == signal.SIGTERM:
    assert status == 128 + how and os.path.isdir(os.path.join(broken, "checkpoints", str(len(lines(broken)))))
  before = len(lines(broken))
  kill_when(lambda: any(int(os.path.basename(p).split(".")[0]) > before for p in
                        glob.glob(os.path.join(broken, "checkpoints", "*.orbax-checkpoint-tmp"))))  # during a save
  resumed = run(broken, *options)
  assert resumed.returncode == 0, resumed.stderr
  assert "Resuming at round" in resumed.stderr
  assert lines(broken) == lines(whole)
  a, b = (saved_state(w) for w in (whole, broken))
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    np.testing.assert_array_equal(x, y)


def saved_state(workdir, rounds=30):
  """The checkpoint of this round as plain arrays."""
  import orbax.checkpoint as ocp
  return ocp.StandardCheckpointer().restore(os.path.join(workdir, "checkpoints", str(rounds), "state"))
