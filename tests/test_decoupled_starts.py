"""How `python -m fgd_jax.decoupled` starts and ends: command line, folders, clusters, sentences, summary; without Ray."""

import errno
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fgd_jax import config as configs
from fgd_jax.decoupled.options import check
from fgd_jax.decoupled.store import STEP_KEYS, checkpoints
from fgd_jax.default_config import get_config
from fgd_jax.runlog import RunLog

run = pytest.importorskip("fgd_jax.decoupled.run", reason="needs ray")
from fgd_jax.decoupled import __main__ as command  # noqa: E402
from fgd_jax.decoupled import address, cluster, joining  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def called(*options):
  return subprocess.run([sys.executable, "-m", "fgd_jax.decoupled", *options], cwd=ROOT, capture_output=True, text=True,
                        env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=300)


# --- the command line -----------------------------------------------------------------------------------------------


def test_join_and_replay_take_the_config_of_the_runs_folder(tmp_path):
  argv = ["prog", f"--workdir={tmp_path}", "--join=1", "--config.decoupled.pace=2"]
  assert command._words(["prog", *argv[1:2], "--config=c.py", "--replay"])[2] == "--config=c.py"
  assert command._words(argv[:2]) == argv[:2]  # a run itself needs one
  name, flag, *rest = command._words(argv)
  assert [name, *rest] == argv and flag.startswith("--config=") and flag.endswith(f"saved_config.py:{tmp_path}")
  run.write_config(get_config("learners=3,decoupled.fragments=5,inner_steps=10"), str(tmp_path))
  from fgd_jax.decoupled import saved_config
  saved = saved_config.get_config(str(tmp_path))
  assert configs.flat(saved) == configs.flat(get_config("learners=3,decoupled.fragments=5,inner_steps=10"))


@pytest.mark.parametrize("options, words", [
    (["--join=-1"], "--join=-1 must be the number of learners to add, at least 1"),
    (["--join=2", "--replay"], "give one of them"),
    (["--join=1"], "--join=1 needs a run that goes on in a Ray cluster, and none goes on in --workdir=")])
def test_a_join_that_cannot_be_ends_in_a_sentence(tmp_path, options, words):
  run.write_config(get_config(), str(tmp_path))
  done = called(f"--workdir={tmp_path}", *options)
  assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  folder = str(tmp_path / "run")
  for e in (OSError(errno.EROFS, "Read-only file system", str(tmp_path)), OSError(errno.ENOSPC, "No space left on device"),
            NotADirectoryError(errno.ENOTDIR, "Not a directory", os.path.join(folder, "syncer"))):
    text = command._sentence(e, folder)
    assert text.startswith(f"--workdir={folder} cannot be written ({e.strerror}") and "choose another folder" in text
  for e in (FileNotFoundError(errno.ENOENT, "No such file", folder), PermissionError(errno.EACCES, "Denied", "/data/text")):
    assert command._sentence(e, folder) == str(e)  # something else than the folder is at fault


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupt_says_whether_there_is_something_to_continue_from(tmp_path, monkeypatch, saved):
  told = []
  if saved:
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
  flags = type("Flags", (SimpleNamespace,), {"__getitem__": lambda self, name: SimpleNamespace(value=None)})
  values = flags(config=get_config(), workdir=str(tmp_path), join=None, replay=False, json=False)
  monkeypatch.setattr(command.flags, "FLAGS", values)
  monkeypatch.setattr(command.logging, "error", lambda words, *args: told.append(words % args))
  monkeypatch.setattr(command, "show_own_logs", lambda: None)
  monkeypatch.setattr(run, "decoupled", lambda *args: signal.default_int_handler(2, None))
  with pytest.raises(SystemExit) as end:
    command.main(["prog"])
  assert end.value.code == 130
  assert ("the last checkpoint in" if saved else "before the first checkpoint; the same command starts the run") in told[0]


# --- clusters -------------------------------------------------------------------------------------------------------


def test_a_join_goes_to_the_cluster_of_its_own_run(tmp_path, monkeypatch):
  asked = []
  monkeypatch.setattr(cluster, "connect", lambda address, *rest: asked.append(address))
  os.makedirs(tmp_path / "syncer")
  monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as Ray sets it in the process of the run where it finds a token
  address.record(str(tmp_path), "10.0.0.1:6379")
  monkeypatch.delenv("RAY_AUTH_MODE")
  joining._connect(str(tmp_path), None, 1, "x")
  joining._connect(str(tmp_path), "other:1", 1, "x")
  address.authenticate(str(tmp_path))
  assert asked == ["10.0.0.1:6379", "other:1"] and os.environ.pop("RAY_AUTH_MODE") == "token"
  address.forget(str(tmp_path))
  with pytest.raises(ValueError, match="--join=1 needs a run"):
    joining._connect(str(tmp_path), None, 1, "x")


def test_a_join_to_a_run_that_was_killed_names_it(tmp_path):
  os.makedirs(tmp_path / "syncer")
  address.record(str(tmp_path), "127.0.0.1:1")
  with pytest.raises(ValueError, match="--join=2: the Ray cluster 127.0.0.1:1 of the run .* was the run killed"):
    joining._connect(str(tmp_path), None, 2, "x")


def test_a_join_warns_and_gives_up_where_the_syncer_does_not_answer(monkeypatch):
  told, answers = [], [[], [], ["yes"], []]
  monkeypatch.setattr(joining, "_answer", lambda method: answers.pop(0))
  monkeypatch.setattr(joining.logging, "warning", lambda words, *args: told.append(words % args))
  patience = joining._Patience(get_config("decoupled.silent_after=5,limits.stall=60"))
  patience._since -= 6
  assert patience.answer(None) == patience.answer(None) == [] and len(told) == 1 and "is it paused" in told[0]
  assert patience.answer(None) == ["yes"]
  patience._since -= 61
  with pytest.raises(ValueError, match="syncer has not answered for 61 s .limits.stall=60"):
    patience.answer(None)


# --- what a folder holds --------------------------------------------------------------------------------------------


def test_a_run_that_ended_before_its_first_step_does_not_bind_its_config(tmp_path):
  old, new = get_config("inner.lr=0.1"), get_config("inner.lr=0.2")
  check(new)
  os.makedirs(tmp_path / "syncer")
  run.write_config(old, str(tmp_path))
  assert run.recognise(new, str(tmp_path)) is None
  for name, made in (("metrics.jsonl", lambda path: path.write_text('{"round": 1}\n')),
                     ("checkpoints/8", lambda path: path.mkdir(parents=True))):
    made(tmp_path / name)
    with pytest.raises(ValueError, match="inner.lr=0.2 contradicts the run"):
      run.recognise(new, str(tmp_path))
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
  assert checkpoints(str(tmp_path)) == [8]


def test_a_summary_counts_who_contributed_and_who_joined(tmp_path):
  made = SimpleNamespace(workdir=str(tmp_path), step=2, parameters=1, unigram=1.0, options=SimpleNamespace(
      policy="decoupled", learners=3, syncers=2, shards=2))
  line = {k: 1.0 for k in ("eval_loss", "eval_perplexity", "train_loss", "tokens")}
  (tmp_path / "metrics.jsonl").write_text(json.dumps({"round": 2, **line}) + "\n")
  for s, learners in enumerate(([0, 3], [0, 1])):
    os.makedirs(tmp_path / "syncer" / str(s))
    step = {**dict.fromkeys(STEP_KEYS), "step": s + 1, "contributions": [{"learner": m} for m in learners]}
    (tmp_path / "syncer" / str(s) / "tape.jsonl").write_text(json.dumps(step) + "\n")
  summary = run.summarise(made)
  assert (summary["learners"], summary["learners_trained"], summary["learners_joined"]) == (3, 3, 1)


def test_the_bar_counts_syncer_steps(tmp_path, capfd):
  log = RunLog(str(tmp_path), 0, (0, 4), own_events=False, counts="step")
  for t in (1, 2):
    log.write({"round": t, "tokens": 1000 * t, "train_loss": 2.5})
  assert (log._bar.n, log._bar.total) == (2, 4)
  log.close()
  shown = capfd.readouterr().err
  assert "2/4" in shown and "step/s" in shown and "round" not in shown and "loss=2.500" in shown
