"""launch/local.sh --elastic=true: a process is killed, and the run goes on without it and its workers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG = ("configs/default.py:rounds=100,inner_steps=2,workers=4,batch_size=2,seq_len=16,eval_every=0,eval_batches=2,"
          "eval_batch_size=4,measure_every=0,checkpoint_every=5,inner.warmup_steps=2,inner.schedule=constant,model.dim=16,"
          "model.ffn_dim=24,model.layers=1,model.heads=2,model.kv_heads=1,data.source=synthetic,method=diloco")


def test_a_killed_process_ends_neither_the_run_nor_its_counters(tmp_path):
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  run, python = tmp_path / "run", tmp_path / "python"
  python.write_text(f'#!/usr/bin/env bash\necho $$ > {tmp_path}/pid-"$FGD_NUM_PROCESSES-$FGD_PROCESS_ID"\n'
                    f'exec {sys.executable} "$@"\n')
  python.chmod(0o755)
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
      "PYTHON": str(python), "PYTHONPATH": ROOT, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
  script = subprocess.Popen(["bash", "launch/local.sh", "--elastic=true", f"--port={port}", f"--config={CONFIG}",
                             f"--workdir={run}"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)
  until = time.time() + 200
  while time.time() < until and not (run / "checkpoints" / "5").is_dir():
    assert script.poll() is None, script.communicate()
    time.sleep(0.05)
  os.kill(int((tmp_path / "pid-2-1").read_text()), signal.SIGKILL)
  out, errors = script.communicate(timeout=300)
  assert script.returncode == 0, out + errors
  assert "process 1 (cpu 1) died with status 137" in errors and "with 1 processes and 2 workers" in errors
  with open(run / "metrics.jsonl") as f:
    records = [json.loads(line) for line in f]
  assert [r["round"] for r in records] == list(range(1, 101))  # none twice, none missing
  tokens = [b["tokens"] - a["tokens"] for a, b in zip(records, records[1:])]
  full, half = 4 * 2 * 2 * 16, 2 * 2 * 2 * 16
  resumed = tokens.index(half)
  assert tokens == [full] * resumed + [half] * (99 - resumed) and (resumed + 1) % 5 == 0  # from a checkpoint on
  with open(run / "summary.json") as f:
    assert json.load(f)["workers"] == 2
