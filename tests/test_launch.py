"""The launchers: dry runs print what real runs execute, quoting survives, preempted and dead runs start again.

The tools of the places (gcloud, kubectl, sbatch, ssh, python) are replaced by one that writes its arguments down.
"""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest
import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = ("tpu_vm", "gke", "slurm", "ssh", "local", "decoupled")
NASTY = "--config.data.path=/my text/it's $HOME; `x` \"y\""
RECORD = """#!/usr/bin/env bash
# One printf, so one write: processes record at the same time.
printf '%s\\0' "${FGD_PROCESS_ID-}" "${FGD_NUM_PROCESSES-}" "${0##*/}" "$@" $'\\36' >> "$CALLS"
"""


class Tools:
  """Fake tools in front of the path.

  Attributes:
    environment: with which a launcher finds them.
  """

  def __init__(self, folder):
    self.folder, self.log = folder / "bin", folder / "calls"
    self.folder.mkdir()
    for name in ("gcloud", "kubectl", "sbatch", "ssh", "ray"):
      self.make(name)
    self.environment = os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}", "CALLS": str(self.log),
                                     "PYTHON": sys.executable}

  def make(self, name, body=""):
    path = self.folder / name
    path.write_text(RECORD + body)
    path.chmod(0o755)
    return str(path)

  def calls(self):
    """(process, processes, [tool, arguments ...]) of every call, in order."""
    if not self.log.exists():
      return []
    records = [r.split("\0")[:-1] for r in self.log.read_text().split("\36\0")[:-1]]
    return [(r[0], r[1], r[2:]) for r in records]


@pytest.fixture
def tools(tmp_path):
  return Tools(tmp_path)


def launch(name, *options, environment=None, seconds=60):
  return subprocess.run(["bash", f"launch/{name}.sh", *options], cwd=ROOT, capture_output=True, text=True, timeout=seconds,
                        env=environment or os.environ | {"PYTHON": sys.executable})


def commands(text):
  """The commands of a dry run as words, without redirections; files that it writes by name."""
  found, files, lines = [], {}, iter(text.splitlines())
  for line in lines:
    if line.endswith("<<'END_OF_FILE'"):
      name = shlex.split(line)[2]
      files[name] = "\n".join(iter(lambda: next(lines), "END_OF_FILE")) + "\n"
    elif line != "wait" and not line.startswith("mkdir "):
      words = shlex.split(line.replace("> >(tee", ">>"))
      found.append(words[:words.index(">>")] if ">>" in words else words)
  return found, files


@pytest.mark.parametrize("name", SCRIPTS)
def test_dry_run_works_with_defaults_and_touches_nothing(name, tmp_path):
  before = set(os.listdir(ROOT)) | {"runs"}
  done = launch(name, "--dry-run")
  assert done.returncode == 0, done.stderr
  assert f"fgd_jax.{'decoupled' if name == 'decoupled' else 'train'}" in done.stdout
  assert set(os.listdir(ROOT)) <= before


@pytest.mark.parametrize("name", SCRIPTS)
def test_config_workdir_and_keys_reach_the_command_unharmed(name):
  config = "--config=configs/default.py:workers=8,method=LocalM1M2"
  done = launch(name, "--dry-run", config, "--workdir=/runs/run 1", NASTY)
  assert done.returncode == 0, done.stderr
  found, files = commands(done.stdout)
  words = [word for command in found for word in command]
  for text in files.values():
    manifest = yaml.safe_load(text) if text.startswith("apiVersion") else None
    if manifest:
      words += manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    else:
      words += shlex.split(text, comments=True)
  for _ in range(2):  # a shell on another host, and the bash that it starts
    words += [inner for word in words if "fgd_jax.train" in word and " " in word
              for inner in shlex.split(word.removeprefix("--command="))]
  assert NASTY in words and "--workdir=/runs/run 1" in words and config in words


@pytest.mark.parametrize("name, options, words", [
    ("local", ["--process=3"], ["--process is unknown", "--help"]),
    ("local", ["--processes=two"], ["--processes=two", "whole number"]),
    ("local", ["workdir"], ["workdir is not an option", "--name=value"]),
    ("gke", ["--dry-run", "--workdir=/data/a"], ["--workdir=/data/a must be below /runs"]),
    ("local", ["--platform=npu"], ["--platform=npu", "cpu or gpu"]),
    ("ssh", [], ["--hosts=a,b is needed"]),
    ("ssh", ["--hosts=a,,b"], ["--hosts=a,,b"]),
    ("ssh", ["--hosts=a,-oProxyCommand=x"], ["no host"]),
    ("slurm", ["--nodes=0", "--dry-run"], ["--nodes=0"]),
    ("slurm", ["--gpus-per-node=8", "--tasks-per-node=3", "--dry-run"], ["--tasks-per-node=3", "1 or --gpus-per-node=8"]),
    ("tpu_vm", ["--action=fly"], ["--action=fly", "create"]),
    ("gke", ["--dry-run", "--topology=3"], ["--topology=3"]),
    ("gke", ["--dry-run", "--name=My_Run"], ["metadata.name", "My_Run"]),
    ("gke", ["--dry-run", "--bucket=a", "--claim=b"], ["--bucket", "--claim"]),
    ("gke", ["--dry-run", "--topology=4x4", "--chips-per-host=3"], ["--chips-per-host=3", "16 chips"]),
    ("decoupled", ["--submit=http://h:8265", "--ray-address=auto"], ["exclude each other"]),
])
def test_bad_options_get_one_sentence(name, options, words):
  done = launch(name, *options)
  assert done.returncode != 0 and len(done.stderr.strip().splitlines()) == 1, done.stderr
  assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_lists_every_option(name):
  done = launch(name, "--help")
  assert done.returncode == 0
  with open(os.path.join(ROOT, "launch", f"{name}.sh")) as f:
    known = f.read().split('parse_options "')[1].split('"')[0].split()
  for option in known:
    assert f"--{option.split('=')[0]}" in done.stdout, option


def test_missing_tools_are_named(tmp_path):
  (tmp_path / "bin").mkdir()
  for tool in ("bash", "dirname", "basename", "env", "cat", "awk"):
    (tmp_path / "bin" / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
  bare = {"PATH": str(tmp_path / "bin"), "PYTHON": sys.executable}
  for name, options, tool in (("tpu_vm", ["--bucket=b"], "gcloud"), ("gke", ["--image=i", "--bucket=b"], "kubectl"),
                              ("slurm", [], "sbatch")):
    done = launch(name, *options, environment=bare)
    assert done.returncode == 2 and f"{tool} was not found" in done.stderr, done.stderr


# --- dry run and real run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", [
    ("slurm", ["--nodes=4", "--gpus-per-node=8", "--partition=a100"]),
    ("gke", ["--image=reg/fgd:1", "--bucket=b", "--slices=2"]), ("decoupled", ["--submit=http://head:8265"])])
def test_what_is_executed_is_what_a_dry_run_prints(name, options, tools, tmp_path):
  options = [*options, f"--workdir={'/runs' if name == 'gke' else tmp_path}/run 1", NASTY]
  printed, files = commands(launch(name, *options, "--dry-run", environment=tools.environment).stdout)
  assert not tools.calls()
  done = launch(name, *options, environment=tools.environment)
  assert done.returncode == 0, done.stderr
  assert [call for _, _, call in tools.calls()] == [[os.path.basename(words[0]), *words[1:]] for words in printed]
  for path, text in files.items():
    with open(os.path.join(ROOT, path)) as f:
      assert f.read() == text
    if path.startswith("runs"):
      os.remove(os.path.join(ROOT, path))


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_what_a_dry_run_prints_runs_as_a_script(name, tools, tmp_path):
  """Also in a new folder: the redirections find their folder made."""
  tools.make("env")
  printed = launch(name, "--dry-run", f"--workdir={tmp_path}/run 1", environment=tools.environment).stdout
  done = subprocess.run(["bash", "-e"], input=printed, capture_output=True, text=True, cwd=ROOT, env=tools.environment)
  assert done.returncode == 0 and not done.stderr
  assert len(os.listdir(tmp_path / "run 1" / "logs")) == (2 if name == "local" else 1)


@pytest.mark.parametrize("slices", [1, 2])
def test_tpu_vm_executes_what_a_dry_run_prints(slices, tools):
  tools.make("gcloud", 'case "$*" in *describe*) echo ACTIVE ;; esac\n')
  options = [f"--slices={slices}", "--bucket=b", "--name=test-fgd", NASTY]
  printed, _ = commands(launch("tpu_vm", *options, "--dry-run", environment=tools.environment).stdout)
  done = launch("tpu_vm", *options, environment=tools.environment)
  assert done.returncode == 0, done.stderr
  got, wanted = [call for _, _, call in tools.calls()], [words for words in printed if words[0] == "gcloud"]
  assert sorted(got) == sorted(wanted)  # the slices run at the same time
  assert got[:2] == wanted[:2] and got[-1] == wanted[-1] and "delete" in got[-1]
  assert sum("fgd_jax.train" in " ".join(words) for words in got) == slices


def test_tpu_vm_queues_again_after_a_preemption_only(tools):
  state = tools.folder / "state"
  state.write_text("ACTIVE")
  tools.make("gcloud", f"""
case "$*" in
  *create*) echo ACTIVE > {state} ;;
  *describe*) cat {state} ;;
  *fgd_jax.train*) if [ -e {state}.second ]; then exit 0; fi
                   touch {state}.second; echo "$NEXT" > {state}; exit 1 ;;
esac
""")
  done = launch("tpu_vm", "--bucket=b", "--name=test-fgd", environment=tools.environment | {"NEXT": "SUSPENDED"})
  assert done.returncode == 0 and "preempted; queued again (1 of 20)" in done.stderr, done.stderr
  kinds = [next(word for word in ("create", "describe", "delete", "fgd_jax.train", "scp", "logs", "venv")
                if word in " ".join(call)) for _, _, call in tools.calls()]
  assert [k for k in kinds if k in ("create", "fgd_jax.train", "delete")] == ["create", "fgd_jax.train", "delete"] * 2
  os.remove(f"{state}.second")
  tools.log.unlink()
  done = launch("tpu_vm", "--bucket=b", "--name=test-fgd", environment=tools.environment | {"NEXT": "ACTIVE"})
  assert done.returncode == 1 and sum("create" in call for _, _, call in tools.calls()) == 1


def test_ssh_starts_one_process_on_each_host_with_its_options_intact(tools, tmp_path):
  tools.make("ssh", 'exec sh -c "${@: -1}"\n')  # as sshd does with the last argument
  python = tools.make("fake-python", 'sleep 0.2\n')
  done = launch("ssh", "--hosts=a,user@b,c", f"--directory={ROOT}", f"--python={python}", f"--workdir={tmp_path}/run 1",
                NASTY, environment=tools.environment)
  assert done.returncode == 0, done.stderr
  hosts = sorted(call[-2] for _, _, call in tools.calls() if call[0] == "ssh")
  assert hosts == ["a", "c", "user@b"]
  processes = [c for c in tools.calls() if c[2][0] == "fake-python"]
  assert sorted(p[:2] for p in processes) == [("0", "3"), ("1", "3"), ("2", "3")]
  for _, _, call in processes:
    assert call[1:] == ["-m", "fgd_jax.train", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run 1", NASTY,
                        "--config.allow_cpu=false"]


def test_slurm_job_is_a_script_whose_lines_slurm_reads_first():
  _, files = commands(launch("slurm", "--dry-run", "--time=02:00:00", "--gpus-per-node=4", "--tasks-per-node=4").stdout)
  (job,) = files.values()
  lines = job.splitlines()
  directives = [line for line in lines if line.startswith("#SBATCH")]
  assert lines[0].startswith("#!") and lines[1:1 + len(directives)] == directives  # SLURM stops at the first command
  for wanted in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=02:00:00", "--signal=TERM@180",
                 "--requeue"):
    assert f"#SBATCH {wanted}" in directives
  assert subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0


def test_manifest_has_a_pod_for_every_host_of_every_slice():
  _, files = commands(launch("gke", "--dry-run", "--slices=3", "--topology=2x2x4", "--spot=true", "--claim=runs").stdout)
  (text,) = files.values()
  manifest = yaml.safe_load(text)
  (job,) = manifest["spec"]["replicatedJobs"]
  assert job["replicas"] == 3 and job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 4
  pod = job["template"]["spec"]["template"]["spec"]
  assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
  assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x4"
  assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]


@pytest.mark.parametrize("spoil, words", [
    (lambda spec, job, pod: spec.update(replicas=2), "replicas"),
    (lambda spec, job, pod: job.update(backoffLimit=3), "backoffLimit"),
    (lambda spec, job, pod: pod["containers"][0].pop("name"), "name"),
    (lambda spec, job, pod: pod.update(nodeSelektor={}), "nodeSelektor"),
])
def test_a_wrong_manifest_is_refused(spoil, words, monkeypatch):
  monkeypatch.syspath_prepend(os.path.join(ROOT, "launch"))
  import jobset
  _, files = commands(launch("gke", "--dry-run").stdout)
  (text,) = files.values()
  manifest = yaml.safe_load(text)
  jobset.check(manifest)
  job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
  spoil(manifest["spec"], job, job["template"]["spec"])
  with pytest.raises(ValueError, match=words):
    jobset.check(manifest)


# --- processes that are watched together -----------------------------------------------------------------------------


def supervised(tools, tmp_path, body, *options, signal=None):
  """launch/local.sh with a program in place of python; returns its end and the training processes that it started."""
  python = tools.make("fake-python", body)
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text(json.dumps({"seed": 0, "workers": 6, "rounds": 3}, indent=2))
  process = subprocess.Popen(["bash", "launch/local.sh", f"--workdir={tmp_path}/run", *options], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tools.environment | {"PYTHON": python})
  if signal:
    time.sleep(1.5)
    process.send_signal(signal)
  _, errors = process.communicate(timeout=60)
  return process.returncode, errors, [c for c in tools.calls() if c[2][1] == "-m"]


def test_a_dead_process_takes_the_others_along_and_the_run_starts_again(tools, tmp_path):
  began = time.monotonic()
  code, errors, calls = supervised(
      tools, tmp_path, f'if [ -e {tmp_path}/again ]; then exit 0; fi\n'
      f'if [ "$FGD_PROCESS_ID" = 1 ]; then sleep 0.5; touch {tmp_path}/again; exit 9; fi\nexec sleep 50\n', "--restarts=1")
  assert code == 0 and "process 1 (cpu 1) died with status 9" in errors and time.monotonic() - began < 30
  assert sorted(c[:2] for c in calls) == [("0", "2"), ("0", "2"), ("1", "2"), ("1", "2")]


def test_elastic_goes_on_without_the_dead_process_and_its_workers(tools, tmp_path):
  """Process 1 of GPUs 0, 1, 2 dies; the others notice and end with 4, one of them before it is seen that 1 is gone."""
  environ = 'echo "$CUDA_VISIBLE_DEVICES" >> ' + f"{tmp_path}/gpus-$FGD_NUM_PROCESSES\n"
  code, errors, calls = supervised(
      tools, tmp_path, environ + 'if [ "$FGD_NUM_PROCESSES" = 2 ]; then exit 0; fi\n'
      'case "$FGD_PROCESS_ID" in 0) sleep 0.5; exit 4 ;; 1) sleep 1.2; exit 137 ;; 2) sleep 1.2; exit 4 ;; esac\n',
      "--processes=3", "--elastic=true", "--platform=gpu")
  assert code == 0 and "process 1 (gpu 1) died with status 137" in errors and "with 2 processes and 4 workers" in errors
  last = calls[3:]
  assert sorted(c[:2] for c in last) == [("0", "2"), ("1", "2")] and all(c[2][-1] == "--config.workers=4" for c in last)
  assert sorted((tmp_path / "gpus-2").read_text().split()) == ["0", "2"]


def test_a_process_that_hangs_is_the_one_that_is_left_behind(tools, tmp_path):
  """jax aborts those that no longer hear of it (134)."""
  code, errors, calls = supervised(
      tools, tmp_path, 'if [ "$FGD_NUM_PROCESSES" = 2 ]; then exit 0; fi\n'
      'if [ "$FGD_PROCESS_ID" = 1 ]; then exec sleep 50; fi\nsleep 0.5\nexit 134\n', "--processes=3", "--elastic=true")
  assert code == 0 and "process 1 (cpu 1) died" in errors and "with 2 processes and 4 workers" in errors


def test_ssh_goes_on_without_a_host_that_died(tools, tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text(json.dumps({"workers": 4}, indent=2))
  tools.make("ssh", 'case "$*" in *" a "*) exit 255 ;; esac\nsleep 0.5\n'
             'case "$*" in *FGD_NUM_PROCESSES=2*) exit 4 ;; esac\n')
  done = launch("ssh", "--hosts=a,b", "--elastic=true", f"--workdir={tmp_path}/run", environment=tools.environment)
  assert done.returncode == 0 and "process 0 (a) died with status 255" in done.stderr, done.stderr
  hosts = [call[-2] for _, _, call in tools.calls()]
  assert sorted(hosts[:2]) == ["a", "b"] and hosts[2:] == ["b"]
  assert "FGD_COORDINATOR=b:8476 FGD_NUM_PROCESSES=1" in tools.calls()[2][2][-1]
  assert "--config.workers=2" in tools.calls()[2][2][-1]


@pytest.mark.parametrize("status", [2, 143])
def test_what_cannot_work_and_what_was_told_to_stop_is_not_repeated(status, tools, tmp_path):
  code, _, calls = supervised(tools, tmp_path, f"exit {status}\n", "--restarts=5")
  assert code == status and len(calls) == 2


def test_a_signal_is_passed_on_and_ends_the_run(tools, tmp_path):
  code, _, calls = supervised(
      tools, tmp_path, "trap 'sleep 0.3; exit 143' TERM\nfor i in $(seq 200); do sleep 0.1; done\nexit 1\n", "--restarts=5",
      signal=15)
  assert code == 143 and len(calls) == 2
