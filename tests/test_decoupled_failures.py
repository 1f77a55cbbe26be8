"""Decoupled DiLoCo when something fails, without Ray processes: rules of the cores, files, threads of the actors."""

import json
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from decoupled_helpers import Cluster, contribution, options, zeros

from fgd_jax.checkpoint import ConfigMismatchError
from fgd_jax.config import flat
from fgd_jax.decoupled.options import check, fingerprint, refuse_mismatch, refuse_other_run
from fgd_jax.decoupled.store import STEP_KEYS, TAPE, Store, cut_tape, read_tape
from fgd_jax.decoupled.syncer import RESEEDS, Contribution, SyncerCore
from fgd_jax.default_config import get_config
from fgd_jax.quarantine import NonFiniteError

RULES = dict(learners=3, quorum=1, inner_steps=4, fragments=4, overlap=2, grace=0.9, merge="rda", silent_after=3.5)


# --- lives, quorum, contributions -----------------------------------------------------------------------------------


def test_a_learner_that_died_while_it_joined_is_one_life_to_all_syncers(x64):
  cluster = Cluster(options(**{**RULES, "syncers": 2}))
  first, second = cluster.syncers
  first.join(1, {}, 1.0)  # and dies before it joins the second
  life, _ = first.join(1, {}, 2.0)
  second.join(1, {}, 2.0, life)
  assert life == 3 and [core.members[1].life for core in cluster.syncers] == [3, 3]
  assert all(core.heard(1, 3, 3.0, 1) and not core.heard(1, 2, 3.0, 1) for core in cluster.syncers)


def test_a_step_below_its_quorum_does_not_close(x64):
  cluster = Cluster(options(**{**RULES, "quorum": 2}))
  core, = cluster.syncers
  core.heard(2, 1, 1.0, 3, 1.0)  # in reach, so that the grace window is waited for
  assert core.offer(contribution(cluster, 0, step_seconds=1.0), 1.0) == "taken" and not core.opened(2)[1]
  assert core.offer(contribution(cluster, 1, step_seconds=1.0), 1.0) == "taken" and core.opened(2)[1]
  core.join(1, {}, 1.1)
  assert core.due(1.2) == (False, None) and core.due(100.0) == (False, None) and not core.opened(2)[1]
  assert core.offer(contribution(cluster, 2, step_seconds=1.0), 101.0) == "taken"
  assert core.due(200.0)[0] and [c.learner for c in core.close(200.0).contributions] == [0, 2]


# --- what is not finite ---------------------------------------------------------------------------------------------


def test_a_merge_that_is_not_finite_is_not_taken(x64):
  cluster = Cluster(options(**RULES))
  core, = cluster.syncers
  huge = {k: np.full_like(x, 1e308) for k, x in zeros(cluster.merger, 0).items()}
  assert core.offer(contribution(cluster, 0, payload=huge), 1.0) == "taken"
  closed = core.close(1.0)
  with pytest.raises(NonFiniteError, match="Step 1 .*fragment 0.*lower inner.lr"):
    core.compute(closed)
  assert core.version[0] == 0 and all(np.isfinite(x).all() for x in jax.tree.leaves(core.theta))


def test_learners_that_always_diverge_end_the_run(x64):
  core, = Cluster(options(**{**RULES, "learners": 2})).syncers
  for m in (0, 1):
    core.heard(m, 1, 0.0, 1)
  for i in range(RESEEDS + 1):
    for m in (0, 1):
      assert core.failure is None
      core.ill(m, float(i), "its loss is not finite")
      core.healed(m, float(i))
  assert "inner.lr" in core.failure and "\n" not in core.failure


def test_one_that_diverges_among_others_does_not_end_the_run(x64):
  cluster = Cluster(options(**{**RULES, "learners": 2}))
  core, = cluster.syncers
  core.heard(0, 1, 0.0, 1)  # the other one has joined, and compiles
  for i in range(RESEEDS + 3):
    core.ill(0, float(i), "its loss is not finite")
    core.healed(0, float(i))
  assert core.failure is None
  core.offer(contribution(cluster, 0), 10.0)
  closed = core.close(10.0)
  core.commit(closed, core.compute(closed), 10.0, 0.0)
  assert core.members[0].reseeds == 0  # it has contributed since


# --- the tape -------------------------------------------------------------------------------------------------------


def test_a_cut_tape_keeps_the_events_of_the_open_step_of_each_syncer(tmp_path):
  path = tmp_path / TAPE
  steps, events = [1, 3, 5], [1, 3, 5, 7]
  lines = [{**dict.fromkeys(STEP_KEYS), "step": t} for t in steps] + [{"event": "joined", "syncer_step": t} for t in events]
  path.write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 7, "frag')
  cut_tape(str(path), 3, 2)  # two syncers: after step 3 this one has step 5 open
  assert list(read_tape(str(path))) == [x for x in lines if x.get("step", 0) <= 3 and x.get("syncer_step", 0) <= 5]
  assert path.read_text().endswith("\n")


@pytest.mark.parametrize("line", [b'{"step": 3, "frag', b"\xff\xfe\0\0", b'{"step": 999}', b"5", b'{"a": 1}', b"[]", b""])
def test_a_damaged_tape_is_named_with_its_line(tmp_path, line):
  path = tmp_path / TAPE
  path.write_bytes(b'{"event": "joined", "syncer_step": 1}\n' + line + b"\n")
  for read in (lambda: list(read_tape(str(path))), lambda: cut_tape(str(path), 1, 1)):
    with pytest.raises(ValueError, match="tape.jsonl is damaged in line 2; restore"):
      read()


def test_a_syncer_that_was_killed_in_its_first_line_starts_again(x64, tmp_path):
  cluster = Cluster(options(**RULES))
  (tmp_path / TAPE).write_text('{"event": "started", "syncer_step": 1}\n{"time": 1.0, "actor')
  for starts in (1, 2, 3):
    store, core = Store(str(tmp_path)), SyncerCore(cluster.options, cluster.merger, {}, cluster.params)
    store.load(core, 0.0)
    assert core.epoch == starts and core.t == 1
    for event in core.events:
      store.append(event)
    assert [x["event"] for x in read_tape(str(tmp_path / TAPE))] == ["started"] * (starts + 1)


# --- configs --------------------------------------------------------------------------------------------------------


def test_the_number_of_learners_is_free_unless_it_scales_the_outer_step():
  for policy, free in (("decoupled", True), ("async_mean", False), ("delayed_nesterov", False)):
    ours, theirs = (get_config(f"decoupled.policy={policy},quorum=1,learners={m}") for m in (4, 5))
    if free:
      refuse_mismatch(fingerprint(ours), fingerprint(theirs), "A learner")
      refuse_other_run(theirs, flat(ours), "the run")
      continue
    with pytest.raises(ValueError, match="A learner has learners=5, but the run has 4"):
      refuse_mismatch(fingerprint(ours), fingerprint(theirs), "A learner")
    with pytest.raises(ConfigMismatchError, match="learners=5"):
      refuse_other_run(theirs, flat(ours), "the run")


# --- the actors' threads --------------------------------------------------------------------------------------------

TINY = ("batch_size=2,seq_len=16,model.dim=8,model.ffn_dim=8,model.layers=1,model.heads=2,model.kv_heads=1,"
        "decoupled.policy=async_mean,quorum=1,learners=3,inner_steps=2,steps=2")


@pytest.fixture
def actors(monkeypatch):
  """The module of the actors; `exits` of it lists how processes would have ended."""
  module = pytest.importorskip("fgd_jax.decoupled.actors", reason="needs ray")
  module.exits = []
  monkeypatch.setattr(module.os, "_exit", module.exits.append)
  monkeypatch.setattr(module.ray, "put", lambda x: x)
  monkeypatch.setattr(module, "use_compilation_cache", lambda workdir: None)
  monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
  yield module
  del module.exits


@pytest.fixture
def syncer(actors, tmp_path):
  config = get_config(TINY)
  check(config)
  made = actors.Syncer(config, 256, 3, str(tmp_path), 0)
  made.keys = fingerprint(config)
  for m in range(3):
    made.join(m, made.keys)
  yield made
  made.stop()


def offer_all(syncer, value=0.0):
  payload = {k: x + np.asarray(value, x.dtype) for k, x in zeros(syncer.core.merger, 0).items()}
  with syncer.lock:  # all are there before the first one is merged
    return [syncer.offer(Contribution(m, 1, 1, 2, 0, 2, 64, True, 1.0, 0, [["offer", 2, 1]], dict(payload)), 0)
            for m in range(3)]


def until(done):
  end = time.monotonic() + 60
  while not done():
    assert time.monotonic() < end
    time.sleep(0.01)


def test_merges_on_arrival_stop_at_the_last_step(syncer):
  assert offer_all(syncer) == ["taken"] * 3
  until(lambda: len(syncer.records) >= 2)
  time.sleep(0.3)
  assert [r["step"] for r in syncer.news(0, 0)["records"]] == [1, 2] and syncer.core.over
  assert offer_all(syncer) == ["over"] * 3 and syncer.news(0, 0)["failure"] is None


def test_a_syncer_whose_disk_is_full_says_so_and_merges_nothing_more(syncer, actors):
  def full(line):
    raise OSError(28, "No space left on device")
  syncer.store.append = full
  offer_all(syncer)
  until(lambda: syncer.disk)
  told = syncer.news(0, 0)["disk"]
  assert told.endswith("syncer/0 cannot be written ([Errno 28] No space left on device); make room there.")
  syncer.join(1, syncer.keys)  # whatever is still asked
  assert actors.exits == [] and syncer.failure is None and syncer.news(0, 0)["records"] == []


def test_a_syncer_that_meets_another_error_ends_its_process(syncer, actors):
  def broken(line):
    raise MemoryError
  syncer.store.append = broken
  offer_all(syncer)
  until(lambda: actors.exits)
  assert actors.exits == [1] and syncer.failure is None and syncer.disk is None


def test_a_syncer_that_would_not_be_finite_says_so(syncer, actors):
  offer_all(syncer, 3e38)
  until(lambda: syncer.failure)
  news = syncer.news(0, 0)
  assert "not finite" in news["failure"] and news["records"] == [] and actors.exits == []


def test_learners_are_asked_for_once_and_by_the_runs_config_only(syncer, actors, tmp_path):
  own = {"decoupled.pace": 0.5, "decoupled.resources": "GPU=1", "allow_cpu": False}
  for token in ("a", "b", "a"):  # the answer to the first one was lost
    syncer.invite(syncer.keys, token, count=2, own=own, platforms="cuda")
  again = actors.Syncer(get_config(TINY), 256, 3, str(tmp_path), 0)
  again.keys = syncer.keys
  again.invite(syncer.keys, "b", count=2, own=own, platforms="cuda")  # and after a restart
  invited = [e for e in again.news(0, 0)["events"] if e["event"] == "invited"]
  again.stop()
  assert [e["token"] for e in invited] == ["a", "b"] and invited[0]["own"] == own and invited[0]["count"] == 2
  with pytest.raises(ValueError, match="--join has inner.lr=9.0, but the run has"):
    syncer.invite({**syncer.keys, "inner.lr": 9.0}, "c", count=1, own=own, platforms="")


def test_a_learner_fails_for_good_where_it_is_refused_and_starts_again_otherwise(actors):
  def fails(core, error):
    learner = object.__new__(actors.Learner)
    learner.core, learner.failure, learner.stopped = core, None, False
    actors.exits.clear()
    learner._fail(error)
    return list(actors.exits), learner.failure

  assert fails(None, RuntimeError("no memory")) == ([], "RuntimeError: no memory")
  assert fails("trains", ValueError("A refusal.")) == ([], "A refusal.")
  assert fails("trains", OSError(28, "No space left"))[0] == [1]


def test_a_learner_joins_all_syncers_as_the_first_one_counts(actors, monkeypatch):
  heard = []

  def answering(life, cut):
    def join(number, keys, life_so_far, least):
      heard.append((number, life_so_far, least))
      return {"life": life_so_far or life, "n": 5, "cut": cut, "fragments": {}}
    return SimpleNamespace(join=SimpleNamespace(remote=join))

  monkeypatch.setattr(actors.ray, "get", lambda x, timeout=None: x)
  learner = object.__new__(actors.Learner)
  learner.config, learner.number, learner.syncers = get_config(TINY), 2, [answering(4, 8), answering(3, 9)]
  learner.resumes = 4
  learner.cut_done, learner.cut_number, learner.cut_state = threading.Condition(), 9, {"arrays": "of the life before"}
  assert learner._join() == (4, 5, {}) and heard == [(2, None, 4), (2, 4, 4)]
  assert (learner.cut_number, learner.cut_state) == (9, None)


def test_a_contribution_is_brought_until_it_is_answered_and_holds_up_none_to_another_syncer(actors, monkeypatch):
  reached, answer, tries = queue.Queue(), threading.Event(), []

  def get(call, timeout):
    s, t = call
    if s == 0 and len(tries) < 2:
      tries.append(t)
      answer.wait(60)
      raise actors.ray.exceptions.GetTimeoutError
    reached.put(call)
    return "taken"

  monkeypatch.setattr(actors.ray, "get", get)
  monkeypatch.setattr(actors, "RETRY_SECONDS", 0.0)
  learner = object.__new__(actors.Learner)
  learner.options, learner.stopped = options(**{**RULES, "syncers": 2}), False
  learner.syncers = [SimpleNamespace(offer=SimpleNamespace(remote=lambda c, cut, s=s: (s, c.t))) for s in (0, 1)]
  learner.outboxes = [ThreadPoolExecutor(1) for _ in learner.syncers]
  learner.answers, learner.cut_number = {}, 0
  learner.loss, learner.step_seconds, learner.transfer = 1.0, 0.1, 0.5
  sent = [SimpleNamespace(t=t, seq=10 + t, payload={}) for t in (1, 2)]
  learner.core = SimpleNamespace(offers=lambda: sent)
  learner._offer(learner.core)
  assert reached.get(timeout=60) == (1, 2)
  answer.set()
  assert reached.get(timeout=60) == (0, 1)
  for outbox in learner.outboxes:
    outbox.shutdown()
  assert tries == [1, 1] and learner.answers == {"taken": 2, "lost": 2} and learner.transfer < 0.5


# --- the cluster ----------------------------------------------------------------------------------------------------


def test_learners_without_a_place_are_refused():
  cluster = pytest.importorskip("fgd_jax.decoupled.cluster", reason="needs ray")
  config = get_config("learners=4,quorum=2,decoupled.resources=GPU=1")
  o = check(config)
  cluster.check_room(config, o, {"CPU": 3.0, "GPU": 2.0})
  with pytest.raises(ValueError, match="Ray has 0 GPU .*reserve 1 each, and quorum=2.*decoupled.resources"):
    cluster.check_room(config, o, {"CPU": 64.0})
  with pytest.raises(ValueError, match="Ray has 1 CPU .*quorum=2"):
    cluster.check_room(config, o, {"CPU": 2.0, "GPU": 2.0})


def test_an_address_that_is_not_ray_is_refused_within_the_limit(monkeypatch):
  cluster = pytest.importorskip("fgd_jax.decoupled.cluster", reason="needs ray")
  monkeypatch.setattr(cluster, "CONNECT_SECONDS", 3.0)
  with socket.create_server(("127.0.0.1", 0)) as server:
    began = time.monotonic()
    with pytest.raises(ValueError, match="something answers there, but not as Ray within 3 s"):
      cluster.connect(f"127.0.0.1:{server.getsockname()[1]}", 0, "x")
    assert time.monotonic() - began < 15


def test_a_cluster_that_wants_a_token_is_named(monkeypatch):
  cluster = pytest.importorskip("fgd_jax.decoupled.cluster", reason="needs ray")
  refusal = SimpleNamespace(stderr="W gcs_client.cc: Unauthenticated: RPC error: InvalidAuthToken: token is missing")
  monkeypatch.setattr(cluster.subprocess, "run", lambda *words, **options: refusal)
  refused = pytest.raises(ValueError, match="wants a token.*RAY_AUTH_MODE=token")
  with socket.create_server(("127.0.0.1", 0)) as server, refused:
    cluster.connect(f"127.0.0.1:{server.getsockname()[1]}", 0, "x")


def test_runs_in_folders_of_the_same_name_have_names_of_their_own(tmp_path):
  run = pytest.importorskip("fgd_jax.decoupled.run", reason="needs ray")
  names = {run.namespace_of(str(tmp_path / folder / "run")) for folder in ("a", "b", "a/../b")}
  assert len(names) == 2 and all(name.startswith("fgd_jax run ") for name in names)


# --- the run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet():
  """A run whose actors have never answered, as far as `tick` looks at it, and the module."""
  run = pytest.importorskip("fgd_jax.decoupled.run", reason="needs ray")
  made = object.__new__(run.Run)
  made.workdir, made.options, made._start = "folder", options(**RULES), time.monotonic() + 100

  def watched(name):
    one = run.Watched(name, None, None)
    one._again = float("inf")
    return one

  made._watched_syncers = [watched("syncer 0")]
  made._watched_learners = [watched(f"learner {m}") for m in range(3)]
  made._lines = {}
  return run, made


def test_learners_that_never_get_a_place_end_the_run(quiet):
  run, made = quiet
  made.step = 0
  made.tick()
  made._start = 0.0
  with pytest.raises(ValueError, match="Ray has started 0 learners within 180 s, and quorum=1"):
    made.tick()
  made._watched_learners[1].last = {"failure": None}
  made.tick()
  assert made._start is None


def test_joined_learners_continue_resting_states_first_and_have_new_numbers(quiet, monkeypatch):
  run, made = quiet
  started, given = [], []
  handle = SimpleNamespace(give=SimpleNamespace(remote=given.append))
  monkeypatch.setattr(run.cluster, "start_learner", lambda *words: started.append(words) or handle)
  made.config, made.platforms, made.vocab_size = get_config("decoupled.pace=0"), "cpu", 256
  made.learners, made._watched_learners, made._numbers, made._next = [], [], set(), 6
  made._unused, made._lives = {0: "state 0", 4: "state 4"}, {0: 2, 4: 7, 5: 1}  # two of six learners had died at the cut
  for m in range(3):
    made.add_learner(m)
  own = {"decoupled.pace": 0.5, "decoupled.resources": "GPU=1"}
  made._admit({"count": 3, "token": "t", "platforms": "cuda", "own": own})
  made.add_learner()
  numbers = [words[6] for words in started]
  assert numbers == [0, 1, 2, 4, 6, 7, 8] and [w.name for w in made._watched_learners] == [f"learner {m}" for m in numbers]
  assert given == ["state 0", "state 4"] and [words[7] for words in started] == [3, 0, 0, 8, 0, 0, 0]  # lives that resume
  assert [words[8] for words in started[3:]] == ["t 0", "t 1", "t 2", None]
  config, *_, platforms = started[3][:6]
  assert (config.decoupled.pace, config.decoupled.resources, platforms) == (0.5, "GPU=1", "cuda")
  assert made.config.decoupled.pace == 0 and started[6][0] is made.config


def test_a_syncer_that_does_not_start_again_ends_the_run(quiet):
  run, made = quiet
  made.step = 0
  made._watched_syncers[0].down = time.monotonic(), "No space left on device"
  made.tick()
  made._watched_syncers[0].down = time.monotonic() - run.cluster.START_SECONDS - 1, "No space left on device"
  with pytest.raises(ValueError, match="syncer 0 has died .*No space left on device.*the same command continues"):
    made.tick()


def test_a_syncer_that_does_not_answer_is_noted_and_ends_the_run_after_limits_stall(quiet, monkeypatch):
  run, made = quiet
  made.step, made.note, notes = 0, lambda *words: notes.append(words[:2]), []
  made.config = get_config("limits.stall=60")
  watched, ready = made._watched_syncers[0], []
  news = {"failure": None, "disk": None, "events": [], "records": [], "pid": 17}
  watched._again, watched._ask, made._known = 0.0, lambda handle: "call", [[0, 0]]
  monkeypatch.setattr(run.ray, "wait", lambda calls, timeout: (list(ready), calls))
  monkeypatch.setattr(run.ray, "get", lambda call: news)
  made.tick()
  assert notes == []
  watched._asked -= made.options.silent_after
  made.tick()
  made.tick()
  assert notes == [("syncer 0", "silent")]
  ready.append("call")
  made.tick()
  assert notes == [("syncer 0", "silent"), ("syncer 0", "back")] and watched.waited() == 0
  ready.clear()
  watched._again = 0.0
  made.tick()
  watched._asked -= 61
  with pytest.raises(ValueError, match="syncer 0 .process 17. has not answered for 6. s; limits.stall=60.*same command"):
    made.tick()
  made.config = get_config("limits.stall=0")  # for ever
  made.tick()
  news["disk"], made.workdir = "folder/syncer/0 cannot be written.", "folder"
  ready.append("call")
  with pytest.raises(OSError, match="cannot be written. The same command continues from the last checkpoint in folder"):
    made.tick()


def test_no_thread_waits_for_a_paused_syncer_when_the_run_closes(quiet, monkeypatch):
  run, made = quiet

  def get(calls, timeout):
    made._closing = len(waits.append(timeout) or waits) > 2
    raise run.ray.exceptions.GetTimeoutError

  waits, made._closing, made._evaluate = [], False, None
  monkeypatch.setattr(run.ray, "get", get)
  made.syncers = [SimpleNamespace(parameters=SimpleNamespace(remote=lambda: None))]
  assert made.evaluate() == {} and waits == [run.SLICE_SECONDS] * 3


def test_tokens_of_two_syncers_do_not_fall(quiet, monkeypatch):
  run, made = quiet
  written = []
  made.config = get_config("eval_every=0,checkpoint_every=0")
  made.log = type("Log", (), {"speed": lambda self, tokens: tokens, "write": lambda self, line: written.append(line)})()
  made.step, made._tokens, made._loss = 0, 0, 5.0
  made.options = options(**{**RULES, "steps": 9})
  heard = [100, 80, 120]  # the second syncer has not heard of as many inner steps as the first one
  kept = dict.fromkeys(("fragment", "learners", "quorum_seconds", "grace_seconds", "sync_seconds", "outer_gradient_norm",
                        "bytes_received"), 0)
  made._lines = {t: {**kept, "step": t, "tokens": tokens, "contributions": [], "inner_steps": {0: t}}
                 for t, tokens in enumerate(heard, 1)}
  made._write_lines()
  assert [line["tokens"] for line in written] == [100, 100, 120]
  assert [line["tokens_per_second"] for line in written] == [100, 0, 20]


def test_the_last_checkpoint_waits_for_a_syncer_that_starts_again(quiet, monkeypatch):
  run, made = quiet
  calls = []

  def save():
    calls.append("save")
    if len(calls) < 3:
      raise run.ray.exceptions.RayActorError
    return 7

  made._saving, made.save = None, save
  made.cuts = type("Cuts", (), {"wait": lambda self: calls.append("wait")})()
  monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
  assert made.finish() == 7 and calls == ["save"] * 3 + ["wait"]
  calls.clear()
  monkeypatch.setattr(run.cluster, "START_SECONDS", -1.0)
  with pytest.raises(ValueError, match="last checkpoint was not saved.*the one before in folder"):
    made.finish()
