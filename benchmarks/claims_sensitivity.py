"""Does the JS distance pick embeddings, head and the shallowest layers? Trains small models and measures every block.

    python benchmarks/claims_sensitivity.py --out=docs/claims/sensitivity [--runs=runs/sensitivity] [--jobs=2]

Trains GlobalM1 and GlobalM1LocalM2 with 4 and 8 workers and two seeds on bytes, and GlobalM1 on a vocabulary of 2048, whose
embedding and head are the greater part of the model as in large ones. Each run is measured early and late in training; also
after the outer step, by copying, and, with embedding and head, for every pair of layers. Folders of runs and cases that are
there already are not made again. Writes blocks.csv, pairs.csv, results.md and results.png.
"""

import argparse
import concurrent.futures
import csv
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import trials

SETTINGS = ("model.layers=6,batch_size=2,inner_steps=10,rounds=60,eval_every=20,measure_every=0,checkpoint_every=20,"
            "checkpoint_keep=10,cpu_devices=1,method.outer_momentum=0.4")
LR = {"GlobalM1": 0.6, "GlobalM1LocalM2": 0.7}  # as benchmarks/compare_methods.py tuned them
ROUNDS = (20, 60)
LAYERS = 6
VOCABULARY = 2048
RUNS = [(method, workers, seed, "bytes") for workers in (4, 8) for seed in (1, 2) for method in LR]
RUNS += [("GlobalM1", 4, seed, "bpe") for seed in (1, 2)]
ENDS = ("embed", "lm_head")


def name_of(method: str, workers: int, seed: int, text: str) -> str:
  return f"{method}-M{workers}-seed{seed}" + ("" if text == "bytes" else f"-{text}")


def environment() -> dict[str, str]:
  return trials.one_core() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": trials.ROOT}


def train(folder: str, method: str, workers: int, seed: int, text: str) -> None:
  """One run, in a process of its own; a finished one is left as it is."""
  workdir = os.path.join(folder, name_of(method, workers, seed, text))
  if os.path.exists(os.path.join(workdir, "summary.json")):
    return
  words = f"method={method},workers={workers},seed={seed},{SETTINGS},method.outer_lr={LR[method]}"
  if text == "bpe":
    words += f",data.tokenizer={os.path.join(folder, 'tokenizer.json')}"
  command = [sys.executable, "-m", "fgd_jax.train", f"--config=configs/quickstart.py:{words}", f"--workdir={workdir}"]
  with open(workdir + ".log", "w") as log:
    subprocess.run(command, cwd=trials.ROOT, env=environment(), check=True, stderr=log)
  print(f"trained {workdir}", flush=True)


def make_tokenizer(path: str) -> None:
  """Byte-level BPE on a part of the text that is trained on."""
  from fgd_jax.data import text, tokenizer

  if not os.path.exists(path):
    pieces = itertools.chain.from_iterable(text.read_documents(text.find_files(None), "text"))
    tokenizer.train(itertools.islice(pieces, 200), VOCABULARY, path)


# --- cases -----------------------------------------------------------------------------------------------------------


def cases() -> list[tuple]:
  """(run, round, at, by): the main ones first."""
  found = [(run, r, "inner", "average") for run in RUNS for r in ROUNDS]
  found += [(run, ROUNDS[-1], "outer", "average") for run in RUNS]
  return found + [(run, ROUNDS[-1], "inner", "copy") for run in RUNS if run[1] == 4 and run[3] == "bytes"]


def path_of(folder: str, case: tuple) -> str:
  run, r, at, by = case
  return os.path.join(folder, name_of(*run), f"case-{r}-{at}-{by}.json")


def measure(folder: str, case: tuple) -> None:
  """Measures one case in this process and writes its JSON."""
  import jax

  from fgd_jax.measure import js_when_shared
  from fgd_jax.report import sensitivity

  run, r, at, by = case
  path, workdir = path_of(folder, case), os.path.join(folder, name_of(*run))
  snapshot = sensitivity.read(workdir, r, at)
  found = sensitivity.measure(snapshot, by)
  found["run"] = os.path.basename(workdir)
  if (at, by) == ("inner", "average"):  # embedding and head with every pair of layers
    names = [row["block"] for row in found["blocks"]]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), snapshot.stack)
    after = js_when_shared(snapshot.apply, snapshot.stack, snapshot.tokens, sensitivity.find_blocks(shapes).labels, by)
    found["pairs"] = [{"first": a, "second": b, "drop": found["js_before"] - after(
        np.isin(names, (*ENDS, f"layers_{a}", f"layers_{b}")))} for a, b in itertools.combinations(range(LAYERS), 2)]
  with open(path + ".tmp", "w") as f:
    json.dump(found, f)
  os.replace(path + ".tmp", path)
  print(f"measured {path}", flush=True)


def measure_apart(folder: str, number: int) -> None:
  """One case, once, in a process of its own."""
  if os.path.exists(path_of(folder, cases()[number])):
    return
  subprocess.run([sys.executable, os.path.abspath(__file__), f"--runs={folder}", f"--case={number}"], cwd=trials.ROOT,
                 env=environment(), check=True)


# --- tables and plot ---------------------------------------------------------------------------------------------------


def read_all(folder: str) -> list[dict]:
  """The cases that are measured, with what they are of."""
  rows = []
  for case in cases():
    (method, workers, seed, text), r, at, by = case
    path = path_of(folder, case)
    if os.path.exists(path):
      with open(path) as f:
        rows.append(json.load(f) | {"method": method, "workers": workers, "seed": seed, "text": text, "round": r})
  return rows


def ranks_of(found: dict) -> dict[str, int]:
  """Rank by drop per MB among embedding, head and layers; the norm's 384 bytes are left out."""
  rows = [row for row in found["blocks"] if row["block"] != "final_norm"]
  return {row["block"]: i for i, row in enumerate(sorted(rows, key=lambda row: -row["drop_per_mb"]), 1)}


def write_csv(path: str, rows: list[dict]) -> None:
  with open(path, "w", newline="") as f:
    writer = csv.DictWriter(f, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def summarise(folder: str, out: str) -> str:
  """Writes the files of `out`; returns the tables."""
  os.makedirs(out, exist_ok=True)
  found = read_all(folder)
  about = lambda f: {key: f[key] for key in ("method", "workers", "seed", "text", "round", "at", "by")}
  blocks = [about(f) | {"block": row["block"], "bytes": row["bytes"], "js_before": round(row["js_before"], 6),
                        "drop": round(row["drop"], 6), "drop_per_mb": round(row["drop_per_mb"], 5),
                        "rank": ranks_of(f).get(row["block"], ""), "greedy": row["chosen"]}
            for f in found for row in f["blocks"]]
  write_csv(os.path.join(out, "blocks.csv"), blocks)
  write_csv(os.path.join(out, "pairs.csv"), [about(f) | {**pair, "drop": round(pair["drop"], 6)}
                                             for f in found for pair in f.get("pairs", ())])
  text = counts(found) + "\n\n" + table(found)
  with open(os.path.join(out, "results.md"), "w") as f:
    f.write(text + "\n")
  plot(os.path.join(out, "results.png"), found)
  return text


NAMES = ["embed", *(f"layers_{i}" for i in range(LAYERS)), "lm_head"]


def short(block: str) -> str:
  return block.replace("layers_", "L").replace("lm_head", "head").replace("final_norm", "norm")


def counts(found: list[dict]) -> str:
  """For each kind of case: mean rank of every block and, in brackets, in how many cases it is among the first four."""
  lines = []
  for text, at, by in dict.fromkeys((f["text"], f["at"], f["by"]) for f in found):
    mine = [f for f in found if (f["text"], f["at"], f["by"]) == (text, at, by)]
    ranks = [ranks_of(f) for f in mine]
    cells = [f"{np.mean([r[n] for r in ranks]):.1f} ({sum(r[n] <= 4 for r in ranks)})" for n in NAMES]
    gains = [100 * (f["greedy"]["drop"] - f["paper"]["drop"]) / f["js_before"] for f in mine]
    lines.append([text, at, by, len(mine), *cells,
                  f"{min(gains):+.1f} to {max(gains):+.1f}, mean {np.mean(gains):+.1f}"])
  return trials.markdown(["text", "at", "by", "cases", *map(short, NAMES), "greedy minus paper, drop in %"], lines)


def table(found: list[dict]) -> str:
  """A line for every case: ranks, drops per MB, greedy subset against the paper's, place of layers 0 and 1 among pairs."""
  head = ["run", "round", "at", "by", "JS", *(f"{short(n)}" for n in NAMES), "greedy subset", "its drop %", "paper's drop %",
          "L0 + L1 among 15 pairs"]
  lines = []
  for f in found:
    ranks, per_mb = ranks_of(f), {row["block"]: row["drop_per_mb"] for row in f["blocks"]}
    percent = lambda subset, f=f: f"{100 * subset['drop'] / f['js_before']:.1f}" if subset else "-"
    pairs = sorted(f.get("pairs", ()), key=lambda pair: -pair["drop"])
    place = [i for i, pair in enumerate(pairs, 1) if (pair["first"], pair["second"]) == (0, 1)]
    greedy = f["greedy"] or {"blocks": []}
    lines.append([
        name_of(f["method"], f["workers"], f["seed"], f["text"]), str(f["round"]), f["at"], f["by"], f"{f['js_before']:.4f}",
        *(f"{ranks[n]} ({per_mb[n]:.3f})" for n in NAMES), " ".join(map(short, greedy["blocks"])), percent(f["greedy"]),
        percent(f["paper"]), f"{place[0]} (first: L{pairs[0]['first']} + L{pairs[0]['second']})" if place else ""])
  return trials.markdown(head, lines)


def plot(path: str, found: list[dict]) -> None:
  """Drop per MB of every block, relative to the mean over blocks, for all cases at the end of the inner phase."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(11, 4.2), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  colours = {("GlobalM1", 4): "#0072B2", ("GlobalM1", 8): "#56B4E9", ("GlobalM1LocalM2", 4): "#D55E00",
             ("GlobalM1LocalM2", 8): "#E69F00"}
  for f in found:
    if (f["at"], f["by"]) == ("inner", "average"):
      total = sum(row["bytes"] for row in f["blocks"]) / 1e6
      per_mb = {row["block"]: row["drop_per_mb"] / f["js_before"] * total for row in f["blocks"]}
      axis = left if f["text"] == "bytes" else right
      label = f"{f['method']}, M={f['workers']}, round {f['round']}" if f["seed"] == 1 else None
      axis.plot(NAMES, [per_mb[n] for n in NAMES], marker="o", ms=4, ls=":" if f["round"] == ROUNDS[0] else "-",
                color=colours[f["method"], f["workers"]], label=label, alpha=0.8)
  left.set_ylabel("share of JS removed / share of bytes")
  for axis, title in ((left, "bytes: embedding and head 7.5 % of the parameters"),
                      (right, f"vocabulary of {VOCABULARY}: 39 %")):
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.set_yscale("log")
    axis.tick_params(axis="x", rotation=30)
    if axis.lines:
      axis.legend(fontsize=8)
  figure.savefig(path, dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", default="docs/claims/sensitivity", help="folder of tables and plot")
  parser.add_argument("--runs", default="runs/sensitivity", help="folder of the runs; the same folder resumes")
  parser.add_argument("--jobs", type=int, default=2, help="processes at a time, each on one core")
  parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  runs, out = os.path.abspath(args.runs), os.path.abspath(args.out)
  if args.case is not None:
    measure(runs, cases()[args.case])
    return
  os.makedirs(runs, exist_ok=True)
  make_tokenizer(os.path.join(runs, "tokenizer.json"))
  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    list(pool.map(lambda run: train(runs, *run), RUNS))
    list(pool.map(lambda number: measure_apart(runs, number), range(len(cases()))))
  print(summarise(runs, out))


if __name__ == "__main__":
  main()
