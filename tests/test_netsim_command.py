"""The command of the network simulator: byte counts, options, pictures, one sentence for what is wrong."""

import os
import re
import subprocess
import sys

import pytest
from references import layered_data_parallel

from fgd_jax.netsim import __main__ as command
from fgd_jax.netsim.links import parse_bandwidth

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
run = lambda *words: command.main(list(words))


def test_bytes_of_a_config_are_those_the_round_counts(printed):
  """Subset by path: embedding, head and two layers of the 1.5B Llama in float32 (tests/test_config.py counts them)."""
  got = printed("utilization", f"--config={ROOT}/configs/llama_1p5b.py", "--step-seconds=4.7", "--bandwidth=200Mbps")
  layer = 2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192 + 2 * 2048
  total = 2 * 128_256 * 2048 + 16 * layer + 2048
  assert got["params"] == total and got["workers"] == 8 and got["inner_steps"] == 100
  assert got["bytes_overlapped"] == pytest.approx(2 * 7 / 8 * 4 * total)
  assert got["bytes_blocking"] == pytest.approx(4 * (2 * 128_256 * 2048 + 2 * layer))
  several = printed("utilization", f"--config={ROOT}/configs/llama_1p5b.py:workers=4", "--method=diloco,GlobalM1",
                    "--step-seconds=4.7", "--bandwidth=200Mbps")["results"]
  coded = printed("utilization", f"--config={ROOT}/configs/llama_1p5b.py:workers=4,method.codec=bf16",
                  "--method=gasloc", "--step-seconds=4.7", "--bandwidth=200Mbps")
  assert coded["bytes_blocking"] == 2 * total
  assert [(r["bytes_overlapped"], r["bytes_blocking"]) for r in several] == [(0, 6.0 * total), (6.0 * total, 0)]


def test_bits_and_codecs(printed):
  """A payload of bits/8 bytes a parameter; int8 has a float32 scale for each 256 values."""
  words = ["utilization", "--method=noloco", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps"]
  sent = lambda *more: printed(*words, *more)["bytes_blocking"]
  assert sent() == 2e9 and sent("--bytes-per-param=4") == 4e9 and sent("--bits-per-param=4") == 0.5e9
  assert sent("--codec=int8") == pytest.approx(1e9 * (1 + 4 / 256)) and sent("--codec=bf16") == 2e9
  assert sent("--codec=e3m0") == pytest.approx(1e9 * (0.5 + 4 / 256))


def test_a_mean_with_a_codec_is_an_all_gather(printed):
  """7 payloads of 1.015625e9 bytes over 1 Gbit/s, not 1.75; as the round of the config counts them."""
  words = ["utilization", "--method=diloco", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps", "--codec=int8"]
  got = printed(*words)
  assert got["bytes_blocking"] == pytest.approx(7 * 1.015625e9)
  assert got["stall_seconds"] == pytest.approx(7 * 8 * 1.015625)
  assert printed(*words, "--transfer=allgather") == got
  coded = printed("utilization", f"--config={ROOT}/configs/quickstart.py:workers=8,method=diloco,method.codec=bf16",
                  "--step-seconds=1", "--bandwidth=1Gbps")
  assert coded["bytes_blocking"] == 7 * 2 * coded["params"]


def test_the_commands_json_and_picture(printed, capsys, tmp_path):
  words = ("utilization", "--params=1.498e9", "--bytes-per-param=2", "--workers=8", "--inner-steps=100",
           "--step-seconds=2.35")
  one = printed(*words, "--method=GlobalM1LocalM2", "--bandwidth=100Mbps")
  assert one["compute_utilization"] == pytest.approx(0.36, abs=0.01) == one["closed_form_utilization"]
  assert one["round_seconds"] == pytest.approx(one["compute_seconds"] + one["stall_seconds"])
  assert one["bytes_overlapped"] == pytest.approx(1.75 * 2 * 1.498e9) and one["bytes_blocking"] == pytest.approx(2 * 1.498e9)
  assert {s["what"] for s in one["timeline"]} >= {"compute", "wait", "mix1", "mix2"}
  picture = tmp_path / "u.png"
  several = printed(*words, "--method=diloco,LocalM1M2", "--bandwidth=100Mbps,1Gbps", f"--plot={picture}")["results"]
  assert [(r["method"], r["bandwidth"]) for r in several] == [
      ("diloco", "100Mbps"), ("diloco", "1Gbps"), ("LocalM1M2", "100Mbps"), ("LocalM1M2", "1Gbps")]
  assert picture.stat().st_size > 5000
  run(*words, "--method=LocalM1M2", "--bandwidth=100Mbps", "--drop=0.05")
  text = capsys.readouterr().out
  assert "closed form" in text and "# inner steps" in text and "kept their own value" in text
  layered = printed(*words, "--method=data_parallel", "--bandwidth=100Gbps", "--layers=16")
  assert layered["compute_utilization"] == pytest.approx(layered_data_parallel(16, 2.35, 1.75 * 16 * 1.498e9, 1e11))


def test_layers_of_the_command(printed, tmp_path):
  """--delay with one fragment, one worker, and the edges of a matrix instead of a worker's link."""
  words = ("utilization", "--params=1e9", "--step-seconds=1", "--inner-steps=10", "--layers=4")
  share = lambda *more: printed(*words, *more)["compute_utilization"]
  late = ("--method=streaming_diloco", "--fragments=1", "--bandwidth=4Gbps")  # 7 s for a mean of 28 Gbit
  assert share(*late, "--delay=0") < 0.65 and share(*late, "--delay=8") == pytest.approx(1)
  for method in ("data_parallel", "diloco", "streaming_diloco"):
    assert share(f"--method={method}", "--workers=1", "--bandwidth=1kbps") == 1
  matrix = tmp_path / "links.txt"
  matrix.write_text("\n".join([" ".join(["1Gbps"] * 8)] * 8))
  got = share("--method=data_parallel", "--transfer=allgather", f"--bandwidth={matrix}")
  assert got == pytest.approx(layered_data_parallel(4, 1.0, 16e9, 1e9))  # one payload an edge, not seven
  ring = share("--method=data_parallel", f"--bandwidth={matrix}")
  assert ring == pytest.approx(layered_data_parallel(4, 1.0, 1.75 * 16e9, 1e9))


def test_a_timeline_that_was_cut_says_so(printed, capsys):
  """Data parallelism, 8 workers, 300 steps: a compute and a wait span of each, and the transfers, 17 spans a step."""
  words = ("utilization", "--method=data_parallel", "--params=1e9", "--step-seconds=1", "--inner-steps=300",
           "--bandwidth=1Gbps")
  got = printed(*words)
  assert len(got["timeline"]) == 2000 and got["timeline_left_out"] == 17 * 300 - 2000
  run(*words)
  assert "3100 later spans of 5100 are left out" in capsys.readouterr().out
  assert printed(*words[:-2], "--inner-steps=2", words[-1])["timeline_left_out"] == 0


def test_the_seed_draws_pairs(printed):
  """On uneven links who meets whom decides."""
  words = ("utilization", "--method=gasloc", "--params=1e9", "--step-seconds=1", "--workers=4", "--rounds=6",
           "--bandwidth=1Gbps;100Mbps;1Gbps;100Mbps")
  shares = [printed(*words, f"--seed={seed}")["compute_utilization"] for seed in range(6)]
  assert len(set(shares)) > 1 and shares[0] == printed(*words)["compute_utilization"]


@pytest.mark.parametrize("text, bits", [("100Mbps", 1e8), ("1.5Gbit/s", 1.5e9), ("25GB/s", 2e11), ("10kbps", 1e4),
                                        ("1e9", 1e9), ("200 Mb/s", 2e8)])
def test_bandwidths(text, bits):
  assert parse_bandwidth(text) == pytest.approx(bits)


UTILIZATION = ["utilization", "--params=1e9", "--step-seconds=1", "--bandwidth=1Gbps"]
FILES = {"keys.py": b"def get_config(arg):\n  return {}['x']\n", "none.py": b"def get_config(arg):\n  return None\n",
         "empty.py": b"", "text.py": b"# A title\nand a text.\n", "binary": bytes(range(256))}


@pytest.mark.parametrize("more, says", [
    (["--bandwidth=quick"], "bandwidth='quick'"), (["--step-seconds=0"], "step_seconds='0'"),
    (["--method=GlobalM3"], "did you mean"), (["--drop=1"], "drop=1"),
    (["--bandwidth=1Gbps;2Gbps"], "2 rates for 8 workers"),
    (["--step-seconds=1;2"], "2 values for 8 workers"), (["--crash-every=9"], "crash_seconds"),
    (["--layers=4"], "GlobalM1LocalM2"), (["--method=streaming_diloco", "--fragments=3"], "must divide"),
    (["--method=GlobalM1LocalM2-subset", "--subset-share=2"], "subset_share=2"), (["--method=,"], "names no method"),
    (["--plot=nowhere/x.png"], "does not exist"), (["--method=gasloc", "--codec=e3m0"], "gasloc sends"),
    # zero
    (["--workers=0"], "'0' must be"), (["--inner-steps=0"], "'0' must be"), (["--rounds=0"], "'0' must be"),
    (["--params=0"], "'0' must be"), (["--bytes-per-param=0"], "'0' must be"), (["--layers=0"], "'0' must be"),
    (["--method=streaming_diloco", "--fragments=0"], "'0' must be"),
    # nonsense
    (["--seed=-1"], "'-1' must be"), (["--jitter=1e200"], "jitter='1e200'"), (["--jitter=gamma:1e-200"], "jitter="),
    (["--crash-every=50", "--crash-seconds=5", "--crash-shape=0.001"], "shape 0.001"),
    (["--crash-every=50", "--crash-seconds=5", "--crash-shape=1e9"], "shape 1e+09"),
    (["--crash-every=0.01", "--crash-seconds=1"], "hardly ever"), (["--pause-every=1e-6", "--pause-seconds=1"], "rarer"),
    (["--drop=0.99999", "--method=diloco"], "smaller probability"), (["--workers=9999999999"], "from 1 to 4096"),
    (["--latency=nan"], "'nan' must be"), (["--latency=1e300"], "from 0 to 1e+09"), (["--bandwidth=1e-320"], "bandwidth="),
    (["--bandwidth=binary"], "is no text"), (["--bandwidth=text.py"], "8 lines of 8 rates"),
    # what would be ignored
    (["--drop-unit=link"], "drop_unit=link has no effect without drop"), (["--drop=0", "--drop-at=end"], "drop_at"),
    (["--crash-seconds=5"], "without crash_every"), (["--on-crash=proceed"], "without crash_every"),
    (["--crash-shape=2"], "without crash_every"), (["--pause-seconds=5"], "without pause_every"),
    (["--method=diloco", "--drop=0.1", "--late-mix1=wait"], "without an overlapped mean"),
    (["--method=gasloc", "--transfer=tree"], "no mean over all workers"),
    (["--subset-share=0.3"], "without a method with a subset"),
    (["--method=diloco,gasloc", "--fragments=3"], "no effect on diloco, gasloc"),
    (["--method=eager_diloco", "--delay=2"], "no effect on eager_diloco"),
    (["--method=local", "--codec=int8"], "codec=int8 has no effect on local"),
    (["--method=diloco", "--codec=int8", "--transfer=ring"], "all-gather"),
    (["--codec=int8", "--bytes-per-param=4"], "exclude each other"),
    (["--bits-per-param=4", "--bytes-per-param=4"], "exclude each other"),
    (["--method=diloco", "--layers=4", "--rounds=5"], "rounds=5 has no effect on the per-layer"),
    (["--method=diloco", "--layers=4", "--seed=5"], "seed=5 has no effect on the per-layer")])
def test_options_that_cannot_be(capsys, tmp_path, monkeypatch, more, says):
  refused(capsys, tmp_path, monkeypatch, [*UTILIZATION, *more], says)


@pytest.mark.parametrize("words, says", [
    ([], "required"), (["utilization", "--step-seconds=1", "--bandwidth=1Gbps"], "params is missing"),
    *((["utilization", "--step-seconds=1", "--bandwidth=1Gbps", f"--config={name}"], says) for name, says in (
        ("nowhere.py", "--config=nowhere.py does not exist; give a file such as"),
        (".", "no Python file that runs"), ("text.py", "no Python file that runs"),
        ("keys.py", "KeyError"), ("none.py", "no ConfigDict"), ("empty.py", "no get_config"), ("binary", "no Python file"))),
    (["utilization", "--config=nowhere.py", "--workers=3", "--step-seconds=1", "--bandwidth=1Gbps"], "comes from the conf"),
    (["table", "nothing"], "invalid choice"), (["table", "fgd", "--seed=1"], "seed=1 has no effect on the table fgd"),
    (["table", "goodput", "--size=1B"], "size=1B"), (["table", "streaming", "--drop=0.1"], "drop=0.1"),
    (["table", "failures", "--bits=16"], "bits=16"), (["table", "streaming", "--bits=1e9"], "bits=1e+09"),
    (["goodput", "--chips=3"], "chips=3"), (["goodput", "--chip-years=0"], "'0' must be"),
    (["goodput", "--chip-years=1e-12"], "fewer days"), (["goodput", "--shape=0.001"], "shape=0.001"),
    (["goodput", "--days=0"], "'0' must be"), (["goodput", "--seed=-1"], "'-1' must be"),
    (["goodput", "--learners=0"], "'0' must be"),
    (["goodput", "--barrier-seconds=1e-9"], "barrier=1e-09"), (["goodput", "--restart=5"], "restart=5"),
    (["goodput", "--learners=1", "--barrier-seconds=100"], "no effect on one learner"),
    (["goodput", "--rigid", "--gather=5"], "gather=5"), (["goodput", "--slice-chips=0"], "'0' must be"),
    (["recommend", "--bandwidth=1Gbps", "--step-seconds=1"], "--params"),
    (["recommend", "--bandwidth=1Gbps", "--step-seconds=1", "--params=1e9", "--inner-steps=0,5"], "inner_steps: '0'"),
    (["recommend", "--bandwidth=1Gbps", "--step-seconds=1", "--params=1e9", "--workers=0"], "'0' must be")])
def test_commands_that_cannot_be(capsys, tmp_path, monkeypatch, words, says):
  refused(capsys, tmp_path, monkeypatch, words, says)


def refused(capsys, folder, monkeypatch, words, says):
  """One sentence on stderr, exit code 2, nothing on stdout; in a folder with FILES."""
  monkeypatch.chdir(folder)
  for name, text in FILES.items():
    (folder / name).write_bytes(text)
  with pytest.raises(SystemExit) as stopped:
    run(*words)
  out, err = capsys.readouterr()
  assert stopped.value.code == 2 and not out
  assert says in err and err.startswith("Error: ") and err.count("\n") == 1 and re.search(r"\.\n$", err)


def test_the_module_runs():
  done = subprocess.run([sys.executable, "-m", "fgd_jax.netsim", "--help"], capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0 and "utilization" in done.stdout and "goodput" in done.stdout
  cut = subprocess.run(["sh", "-c", f"{sys.executable} -m fgd_jax.netsim table fgd | true"], capture_output=True, text=True,
                       cwd=ROOT)
  assert not cut.stderr  # nobody reads the table
