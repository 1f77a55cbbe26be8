"""launch/local_wan.sh: a run over shaped links, and that nothing of it stays behind. Needs root and network namespaces."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG = ("configs/default.py:inner_steps=4,batch_size=2,seq_len=16,eval_batches=2,eval_batch_size=4,model.dim=32,"
          "model.ffn_dim=48,model.layers=1,model.heads=2,model.kv_heads=1,data.source=synthetic")


def obstacle():
  """Why there can be no namespaces here, or ""."""
  if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
    return "needs root and iproute2"
  tried = subprocess.run("ip netns add fgd-test && ip netns del fgd-test", shell=True, capture_output=True)
  return "network namespaces are not allowed here" if tried.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "-")


def start(*options):
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
      "PYTHON": sys.executable, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
  return subprocess.Popen(["bash", "launch/local_wan.sh", f"--config={CONFIG}", *options], cwd=ROOT, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_behind():
  """Namespaces and files of a run."""
  names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
  files = os.listdir("/etc/netns") if os.path.isdir("/etc/netns") else []
  return [name for name in names + files if name.startswith("fgdwan")]


@needs_namespaces
def test_two_workers_on_a_slow_link(tmp_path):
  """GlobalM1's bytes pass the link: 2 (M-1)/M of float32 parameters both ways, at 1 Mbit/s."""
  process = start("--workers=2", "--rate=1mbit", "--methods=GlobalM1", "--rounds=2", f"--workdir={tmp_path}/run")
  out, errors = process.communicate(timeout=400)
  assert process.returncode == 0, errors + out
  with open(tmp_path / "run" / "local_wan.json") as f:
    report = json.load(f)
  on_the_wire = report["parameter_bytes"] * 8 / 1e6  # seconds; 2 (M-1)/M = 1
  assert report["workers"] == 2 and on_the_wire > 0.3
  # The token bucket lets 32 kB pass at once, before and after; headers are on top.
  assert 0.6 * on_the_wire < report["mean_seconds"] < 3 * on_the_wire + 1
  run = report["methods"]["GlobalM1"]
  assert run["bytes_overlapped"] == report["parameter_bytes"] and run["bytes_blocking"] == 0
  assert 0 < run["measured_utilization"] <= 1 and 0 < run["modelled"]["utilization"] <= 1
  assert run["round_seconds"] > 0.6 * on_the_wire  # a round is not shorter than its transfer
  assert "GlobalM1" in out and "off by" in out
  assert not left_behind()


@needs_namespaces
def test_a_signal_ends_everything_and_leaves_nothing(tmp_path):
  process = start("--workers=3", f"--workdir={tmp_path}/run")
  until = time.time() + 60
  while time.time() < until and not os.path.exists(tmp_path / "run" / "logs" / "process-2.log"):
    time.sleep(0.05)
  assert len(left_behind()) == 7, process.poll()  # a switch, three workers, three files
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=60)
  assert process.returncode == 143 and not left_behind()


def packet(receiver, length=1250):
  """An IPv4 packet for a worker; only what the router looks at."""
  head = bytearray(20)
  head[0], head[16:20] = 0x45, bytes((10, 77, 0, receiver + 1))
  return bytes(head) + bytes(length - 20)


def test_router_takes_the_rate_of_both_links_and_the_delay(monkeypatch):
  """1250 bytes at 1 Mbit/s take 10 ms; the delay is 20 ms."""
  monkeypatch.syspath_prepend(os.path.join(ROOT, "launch"))
  from wan_router import Router
  ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
  try:
    router = Router([ours.fileno() for ours, _ in ends], 1e6, 0.020)
    router.take(0, packet(1), 0.0)      # arrives at 10 + 20 ms
    router.take(0, packet(2), 0.0)      # waits for the sender's up-link: 20 + 20 ms
    router.take(2, packet(1), 0.0)      # waits for the receiver's down-link, busy until 10 ms: 20 + 20 ms
    router.take(0, packet(9), 0.0)      # nobody has this address
    assert router.deliver(0.0299) == pytest.approx(0.0001)
    assert router.deliver(0.0301) == pytest.approx(0.0099)
    assert len(ends[1][1].recv(2000)) == 1250
    assert router.deliver(0.0401) is None
    assert len(ends[2][1].recv(2000)) == len(ends[1][1].recv(2000)) == 1250
    ends[1][1].setblocking(False)
    for _ in range(30):
      router.take(0, packet(1), 1.0)
    came = 0
    for step in range(100):             # in turn, since a socket holds a few only
      router.deliver(1.0 + step / 100)
      try:
        came += len(ends[1][1].recv(2000)) // 1250
      except BlockingIOError:
        pass
    assert came in (19, 20)  # a queue of 0.2 s; the last one is a matter of rounding
  finally:
    for pair in ends:
      for s in pair:
        s.close()


@pytest.mark.parametrize("options, words", [
    (["--workers=1"], ["--workers=1", "from 2"]), (["--rate=10"], ["--rate=10", "10mbit"]),
    (["--delay=soon"], ["--delay=soon", "20ms"]), (["--dry-run", "--rounds=x"], ["--rounds=x"])])
def test_bad_options_get_one_sentence(options, words):
  process = start(*options)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 2 and len(errors.strip().splitlines()) == 1 and all(w in errors for w in words), errors


def test_dry_run_prints_links_processes_and_the_teardown():
  process = start("--dry-run", "--workers=2", "--rate=5mbit")
  out, _ = process.communicate(timeout=60)
  lines = out.splitlines()
  assert process.returncode == 0 and sum("tbf rate 5mbit" in line for line in lines) == 4  # two links, both ways
  assert sum(line.startswith("ip netns exec") and "benchmarks/local_wan.py" in line for line in lines) == 2
  assert [line for line in lines if line.startswith("ip netns del")] == [
      "ip netns del fgdwan0", "ip netns del fgdwan1", "ip netns del fgdwanswitch"]
