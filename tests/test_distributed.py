"""Several processes, one run: the roll call, decisions taken together, time limits, and a run that equals that of one."""

import dataclasses
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fgd_jax import cluster, data, distributed
from fgd_jax import config as configs
from fgd_jax import train as trainer
from fgd_jax.cluster import Cluster, StartError
from fgd_jax.default_config import get_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ("inner_steps=2,workers=4,batch_size=2,seq_len=16,eval_every=3,eval_batches=2,eval_batch_size=4,measure_every=0,"
        "checkpoint_every=0,inner.warmup_steps=2,model.dim=16,model.ffn_dim=24,model.layers=1,model.heads=2,model.kv_heads=1,"
        "data.source=synthetic,rounds=60,method=GlobalM1LocalM2,model.dtype=float64,model.param_dtype=float64")


def free_port():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


# --- which processes -------------------------------------------------------------------------------------------------


def test_explicit_variables_make_a_cluster():
  ours = {"FGD_COORDINATOR": "10.0.0.1:8476", "FGD_NUM_PROCESSES": "4", "FGD_PROCESS_ID": "3"}
  assert cluster.from_environment(ours) == (Cluster("10.0.0.1:8476", 4, 3), "")
  assert cluster.from_environment({}) == (None, "")
  assert cluster.from_environment({"FGD_NUM_PROCESSES": "1", "SLURM_JOB_ID": "7"})[0].processes == 1


def test_a_pod_that_is_no_job_of_several_is_one_process(monkeypatch):
  monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # jax warns where it looks at the pod and has no client for it
    assert cluster.from_jax(os.environ, 1) is None


@pytest.mark.parametrize("environment, words", [
    ({"FGD_COORDINATOR": "a:1", "FGD_PROCESS_ID": "0"}, ["FGD_COORDINATOR", "without FGD_NUM_PROCESSES"]),
    ({"FGD_COORDINATOR": "a:1", "FGD_PROCESS_ID": "2", "FGD_NUM_PROCESSES": "2"}, ["FGD_PROCESS_ID=2", "0 to", "1"]),
    ({"FGD_COORDINATOR": "a:1", "FGD_PROCESS_ID": "x", "FGD_NUM_PROCESSES": "2"}, ["FGD_PROCESS_ID='x'", "whole number"]),
    ({"FGD_COORDINATOR": "a", "FGD_PROCESS_ID": "0", "FGD_NUM_PROCESSES": "2"}, ["'a'", "host:port"]),
    ({"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3"}, ["4 hosts", "TPU_WORKER_ID"]),
    ({"MEGASCALE_NUM_SLICES": "2"}, ["MEGASCALE_NUM_SLICES", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_SLICE_ID"]),
])
def test_partial_environments_are_refused_with_a_sentence(environment, words):
  with pytest.raises(StartError) as e:
    cluster.from_environment(environment)
  assert all(word in str(e.value) for word in words), str(e.value)


def test_a_slurm_job_outside_srun_is_one_process_and_says_so():
  found, remark = cluster.from_environment({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"})
  assert found is None and "SLURM job 77" in remark and "SLURM_STEP_NODELIST" in remark and "srun" in remark


SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[07-10]", "SLURM_NTASKS": "8", "SLURM_PROCID": "5",
         "SLURM_LOCALID": "1"}


@pytest.mark.parametrize("extra, devices", [
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)", "CUDA_VISIBLE_DEVICES": "0,1"}, [1]),  # a task for each GPU, all visible
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)", "CUDA_VISIBLE_DEVICES": "1"}, None),   # bound to one by SLURM
    ({"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "CUDA_VISIBLE_DEVICES": "0,1"}, None)])  # a task for each node
def test_slurm_steps_are_recognised_with_their_gpus(extra, devices, monkeypatch):
  for key in list(os.environ):
    if key.startswith(("SLURM", "CUDA_VISIBLE", "OMPI")):
      monkeypatch.delenv(key)
  for key, value in (SLURM | extra).items():
    monkeypatch.setenv(key, value)
  found = cluster.from_jax(os.environ, 1)
  assert found.coordinator.startswith("node07:") and found[1:] == (8, 5, devices)


# --- roll call -------------------------------------------------------------------------------------------------------


def call(processes, seconds=3.0, port=None, about=lambda i: {"lr": 1}, count=None):
  """Roll calls of these process numbers in threads; what each of them was told ("": go on)."""
  port = port or free_port()
  told = [None] * len(processes)

  def one(place, i):
    try:
      cluster.roll_call(Cluster(f"localhost:{port}", count or 3, i), about(i), seconds)
      told[place] = ""
    except StartError as e:
      told[place] = str(e)

  threads = [threading.Thread(target=one, args=item) for item in enumerate(processes)]
  for t in threads:
    t.start()
  for t in threads:
    t.join(60)
  return told


def test_roll_call_of_all_goes_on_and_leaves_the_port_free():
  port = free_port()
  assert call([2, 0, 1], port=port) == ["", "", ""]
  assert call([0, 1, 2], port=port) == ["", "", ""]


def test_missing_processes_are_named_to_all_that_came():
  began = time.monotonic()
  told = call([0, 2], seconds=1.0, count=6)
  assert told[0] == told[1] and "4 of 6 processes" in told[0] and "1, 3-5 missing" in told[0]
  assert time.monotonic() - began < 10


def test_without_process_0_the_others_say_where_they_looked():
  (told,) = call([1], seconds=0.5)
  assert "Process 1 of 3" in told and "no answer from process 0 at localhost:" in told and "refused" in told


def test_unequal_configs_stop_all_and_name_the_key():
  told = call([0, 1, 2], about=lambda i: {"inner.lr": 0.1 if i < 2 else 0.2, "seed": 0})
  assert told[0] and all(t == told[0] for t in told)
  assert "Process 2" in told[0] and "inner.lr=0.2" in told[0] and "0.1" in told[0]


def test_an_index_that_is_there_twice_is_refused():
  assert "Process 1" in (told := call([0, 1, 1])[0]) and "there twice" in told


def test_strangers_on_the_port_are_ignored():
  port = free_port()

  def knock():
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\n", b'{"process": 1}\n'):
      for _ in range(50):
        try:
          with socket.create_connection(("localhost", port), timeout=1) as s:
            s.sendall(text)
          break
        except OSError:
          time.sleep(0.02)

  stranger = threading.Thread(target=knock)
  stranger.start()
  assert call([0, 1, 2], port=port) == ["", "", ""]
  stranger.join()


def test_a_taken_port_is_named():
  with socket.create_server(("", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(StartError, match=f"cannot listen on port {port}.*another port"):
      cluster.roll_call(Cluster(f"localhost:{port}", 2, 0), {}, 1)


# --- time limits -----------------------------------------------------------------------------------------------------


def test_what_takes_too_long_ends_the_process_with_a_sentence():
  code = ("import time\nfrom fgd_jax import distributed\nwith distributed.Watch(0.5) as w:\n"
          "  w.at('Round 7 did not end')\n  time.sleep(60)")
  began = time.monotonic()
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
                        env={**os.environ, "PYTHONPATH": ROOT})
  assert done.returncode == distributed.STALLED and time.monotonic() - began < 50
  assert done.stderr.strip() == "Round 7 did not end within 0 s; this process ends."


def test_an_all_reduce_that_a_process_never_joins_has_a_time_limit():
  """Process 1 is there and hangs: process 0 names the mesh axis and ends."""
  code = ("import sys, time, jax\nfrom fgd_jax import distributed\ndistributed.start({}, 60)\n"
          "mesh = jax.make_mesh((2,), ('worker',))\n"
          "if distributed.index():\n  distributed.together('preflight', lambda: None, 60)\n  time.sleep(60)\n"
          "distributed.preflight(mesh, 3)")
  port = free_port()
  pair = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, env={
      **os.environ, "PYTHONPATH": ROOT, "XLA_FLAGS": "", "FGD_COORDINATOR": f"localhost:{port}", "FGD_NUM_PROCESSES": "2",
      "FGD_PROCESS_ID": str(i)}) for i in range(2)]
  code, errors = end(pair[0])
  pair[1].kill()
  pair[1].communicate()
  assert code == distributed.STALLED, errors
  assert "all-reduce over the mesh axis 'worker' (2 positions, processes [0, 1]) did not end" in errors
  assert "within 3 s" in errors and "reach each other on all ports" in errors


def test_preflight_adds_up_over_every_axis():
  mesh = jax.make_mesh((4, 2), ("worker", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  distributed.preflight(mesh, 60)  # raises where a sum is wrong


@pytest.mark.parametrize("there", ["", "variable", "chip", "device", "plugin"])
def test_only_where_there_is_surely_no_accelerator_jax_does_not_look_for_one(there, monkeypatch):
  """libtpu complains where it is asked and there is no TPU; what jax and libtpu set everywhere is no sign of one."""
  from jax._src import hardware_utils
  for name in [name for name in os.environ if "TPU" in name]:
    monkeypatch.delenv(name)
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  monkeypatch.setattr(hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (4 * (there == "chip"), None))
  monkeypatch.setattr(distributed.glob, "glob", lambda _: ["/dev/accel0"] * (there == "device"))
  monkeypatch.setattr(distributed.importlib.metadata, "entry_points", lambda group: ["cuda"] * (there == "plugin"))
  monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda _: None)
  if there == "variable":
    monkeypatch.setenv("TPU_WORKER_ID", "0")
  assert distributed._only_cpu() == (not there)


def test_a_gpu_that_jax_does_not_use_is_not_passed_over(monkeypatch):
  from jax._src import hardware_utils
  monkeypatch.setattr(hardware_utils, "has_visible_nvidia_gpu", lambda: True)
  distributed.refuse_silent_cpu()  # JAX_PLATFORMS=cpu asks for it
  before = jax.config.jax_platforms
  jax.config.update("jax_platforms", None)
  try:
    with pytest.raises(StartError, match=r"an NVIDIA GPU.*pip install '.\[cuda\]'.*JAX_PLATFORMS=cpu"):
      distributed.refuse_silent_cpu()
  finally:
    jax.config.update("jax_platforms", before)


# --- parts of a run --------------------------------------------------------------------------------------------------


def test_a_process_reads_only_its_own_workers_batches():
  corpus = data.load(get_config(TINY).data, 16, 0)
  whole = data.round_batches(corpus.train, 4, 2, 3, seed=5)
  part = data.round_batches(corpus.train, 4, 2, 3, seed=5, only=[1, 3])
  for r in (0, 7):
    np.testing.assert_array_equal(part[r]["tokens"], whole[r]["tokens"][[1, 3]])


@pytest.mark.parametrize("settings, processes, devices", [
    ("", 2, 1), ("mesh.worker=4", 2, 2), ("mesh.worker=2,mesh.fsdp=2", 4, 1), ("mesh.fsdp=2", 2, 2), ("mesh.worker=4", 3, 2),
    ("cpu_devices=3", 2, 3)])
def test_cpu_devices_of_a_process(settings, processes, devices, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "")
  asked = {}
  monkeypatch.setattr(jax.config, "update", lambda key, value: asked.update({key: value}))
  configs.set_cpu_devices(get_config(TINY + (f",{settings}" if settings else "")), processes)
  assert asked == {"jax_num_cpu_devices": devices}


@dataclasses.dataclass(frozen=True)
class Device:
  """As much of a device as a mesh looks at."""

  id: int
  process_index: int
  platform: str = "cpu"


def test_a_mesh_without_a_part_for_every_process_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: [Device(0, 0), Device(1, 1)])
  with pytest.raises(ValueError, match="workers=3 on 2 processes.*leaves process 1 without a part.*multiple of 2"):
    configs.make_workers(get_config(TINY + ",workers=3"))


def test_a_folder_that_is_not_shared_is_refused(monkeypatch, tmp_path):
  """As process 1 of 2, which was told of a mark that is not there."""
  monkeypatch.setattr(distributed, "count", lambda: 2)
  monkeypatch.setattr(distributed, "index", lambda: 1)
  monkeypatch.setattr(distributed, "by_leader", lambda what, work, seconds: "7 7")
  monkeypatch.setattr(distributed, "together", lambda what, work, seconds: work())
  with pytest.raises(distributed.PeerError, match="not shared: process 1 does not see.*all hosts mount"):
    distributed.shared_file(str(tmp_path / ".lock"), 0.4)
  (tmp_path / ".lock").write_text("7 7")
  distributed.shared_file(str(tmp_path / ".lock"), 0.4)


# --- whole runs ------------------------------------------------------------------------------------------------------


def start(workdir, i, port, *options, processes=2, cache):
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
      "JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT, "FGD_COORDINATOR": f"localhost:{port}", "JAX_COMPILATION_CACHE_DIR": cache,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "FGD_NUM_PROCESSES": str(processes), "FGD_PROCESS_ID": str(i),
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_ENABLE_X64": "1"}
  return subprocess.Popen([sys.executable, "-m", "fgd_jax.train", f"--config=configs/default.py:{TINY}",
                           f"--workdir={workdir}", *options], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def end(process):
  _, errors = process.communicate(timeout=300)
  return process.returncode, errors


def lines(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as f:
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in f]


def saved_state(workdir, rounds):
  """The leaves of a checkpoint, whoever saved it."""
  folder = os.path.join(workdir, "checkpoints", str(rounds), "state")
  pytree = ocp.PyTreeCheckpointer()
  tree = pytree.metadata(folder).item_metadata.tree
  restored = pytree.restore(folder, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree))
  return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(restored)[0]}


def test_two_processes_give_the_run_of_one_also_when_preempted_and_resumed_by_one(tmp_path, x64):
  """Ctrl-C to one process, as SIGTERM: both save the same round and end. Two go on, and so does one; all as one whole run.

  float64; the order in which two processes add up is the only difference.
  """
  cache, two, then_one = str(tmp_path / "cache"), str(tmp_path / "two"), str(tmp_path / "one")
  trainer.train(get_config(TINY), str(tmp_path / "whole"))

  port = free_port()
  pair = [start(two, i, port, cache=cache) for i in range(2)]
  until = time.time() + 200
  while time.time() < until and not (os.path.exists(f"{two}/metrics.jsonl") and os.path.getsize(f"{two}/metrics.jsonl")):
    assert pair[0].poll() is None and pair[1].poll() is None, end(pair[0])[1] + end(pair[1])[1]
    time.sleep(0.05)
  pair[1].send_signal(signal.SIGINT)
  for code, errors in map(end, pair):
    assert code == 128 + signal.SIGTERM and "Told to stop (SIGTERM) after round" in errors, errors
  (at,) = os.listdir(f"{two}/checkpoints")
  assert 0 < int(at) < 60 and len(glob.glob(f"{two}/checkpoints/{at}/data/process_*-of-2.json")) == 2
  shutil.copytree(two, then_one)

  port = free_port()
  pair = [start(two, i, port, cache=cache) for i in range(2)]
  (code, first), (other, second) = map(end, pair)
  assert code == other == 0, first + second
  assert f"Resuming at round {at}" in first and "Done: held-out" in first
  assert "Resuming" not in second and "Done" not in second and "it/s" not in second  # one of them logs
  trainer.train(get_config(TINY), then_one)

  for workdir in (two, then_one):
    assert [r["round"] for r in lines(workdir)] == list(range(1, 61))
    for got, want in zip(lines(workdir), lines(tmp_path / "whole"), strict=True):
      assert got.keys() == want.keys()
      for key in want:
        assert got[key] == pytest.approx(want[key], rel=1e-9), (workdir, want["round"], key)
    state, reference = saved_state(workdir, 60), saved_state(tmp_path / "whole", 60)
    assert state.keys() == reference.keys()
    for path, x in reference.items():
      np.testing.assert_allclose(state[path], x, rtol=1e-9, atol=1e-12, err_msg=path)
  with open(f"{two}/summary.json") as f:
    assert json.load(f)["processes"] == 2


def test_what_only_one_process_knows_stops_both_with_its_sentence(tmp_path):
  """Process 1 sees no data: both end at once with one sentence, and the run's folder holds nothing that looks like a run."""
  port, cache = free_port(), str(tmp_path / "cache")
  code = ("import sys\nfrom fgd_jax import data, train\n"
          "def load(*a):\n  raise FileNotFoundError('data.path=/mnt/text is not there on this host')\n"
          "data.load = load\nfrom fgd_jax.default_config import get_config\n"
          "try:\n  train.train(get_config(sys.argv[1]), sys.argv[2])\n"
          "except FileNotFoundError as e:\n  sys.exit(f'own: {e}')")
  first = start(str(tmp_path / "w"), 0, port, cache=cache)
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
      "JAX_ENABLE_X64": "1", "PYTHONPATH": ROOT, "FGD_COORDINATOR": f"localhost:{port}", "FGD_NUM_PROCESSES": "2",
      "FGD_PROCESS_ID": "1"}
  second = subprocess.Popen([sys.executable, "-c", code, TINY, str(tmp_path / "w")], cwd=ROOT, env=environment,
                            stderr=subprocess.PIPE, text=True)
  (code0, errors0), (code1, errors1) = end(first), end(second)
  assert code0 == 2 and "Process 1 stopped: data.path=/mnt/text is not there on this host" in errors0, errors0
  assert code1 == 1 and "own: data.path=/mnt/text" in errors1, errors1
  assert "Traceback" not in errors0 and not os.path.exists(tmp_path / "w" / "metrics.jsonl")


def test_a_process_alone_says_who_is_missing(tmp_path):
  began = time.monotonic()
  alone = start(str(tmp_path / "w"), 0, free_port(), "--config.limits.start=1", processes=3, cache=str(tmp_path / "cache"))
  code, errors = end(alone)
  assert code == 2 and "2 of 3 processes did not come within 1 s: 1-2 missing" in errors and "Traceback" not in errors
  assert time.monotonic() - began < 60 and not os.path.exists(tmp_path / "w")
