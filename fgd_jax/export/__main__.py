"""Hugging Face weights of a run's model, and text from it.

    python -m fgd_jax.export DIR --out=FOLDER [--round=N] [--which=mean]
    python -m fgd_jax.export sample DIR --prompt="def " [--tokens=200] [--temperature=0.8] [--top-k=40] [--seed=0]

DIR is a run's --workdir; `sample` also takes a FOLDER that was exported. Back into training: --config.init_from=FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import jax
import numpy as np

from fgd_jax import models
from fgd_jax.command import Parser
from fgd_jax.export import huggingface, sampling, trained


def export_parser() -> argparse.ArgumentParser:
  p = Parser(prog="python -m fgd_jax.export", description=__doc__)
  p.add_argument("folder", metavar="DIR", help="a run's folder, or one step in its checkpoints folder")
  p.add_argument("--out", required=True, help="a new folder")
  p.add_argument("--round", type=int, help="of the checkpoint (default: the newest)")
  p.add_argument("--which", choices=("evaluated", "mean"), default="evaluated", help="the model of which eval_loss is "
                 "recorded (default), or the mean of the workers; they differ for fragmented methods alone")
  p.add_argument("--json", action="store_true", help="print what was written as JSON")
  return p


def sample_parser() -> argparse.ArgumentParser:
  p = Parser(prog="python -m fgd_jax.export sample", description="Prints what a trained model says.")
  p.add_argument("folder", metavar="DIR", help="a run's folder, or an exported one")
  p.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
  p.add_argument("--tokens", type=int, default=200, help="tokens to come (default 200)")
  p.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default 0.8)")
  p.add_argument("--top-k", type=int, default=0, help="choose among so many likeliest tokens (default: all)")
  p.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
  p.add_argument("--round", type=int, help="of the checkpoint (default: the newest)")
  p.add_argument("--json", action="store_true", help="print prompt, tokens and text as JSON")
  return p


def export(args: argparse.Namespace) -> None:
  found = trained.read_run(args.folder, args.round, args.which)
  files = huggingface.write_folder(found, args.out)
  count = models.count_params(found.params)
  if args.json:
    print(json.dumps({"out": args.out, "files": files, "parameters": count, "source": found.source}))
    return
  print(f"{args.out}: {found.source}, {count:,} parameters, {', '.join(files)}")
  if found.tokenizer is None:
    print("The run's data have no tokenizer (or its file is gone), so none was written.")


def sample(args: argparse.Namespace) -> None:
  exported = os.path.isfile(os.path.join(args.folder, "model.safetensors"))
  found = huggingface.read_folder(args.folder) if exported else trained.read_run(args.folder, args.round)
  if found.tokenizer is None:
    raise ValueError(f"{args.folder}: its data have no tokenizer (or its file is gone), so there is no text to show.")
  prompt = found.tokenizer.encode_batch([args.prompt.encode()])[0] if args.prompt else found.tokenizer.separator
  model = models.make(found.model)
  tokens = sampling.continue_tokens(model.apply, found.params, np.asarray(prompt).tolist(), args.tokens, found.seq_len,
                                    args.temperature, args.top_k, args.seed)
  if args.json:
    drawn = list(tokens)
    text = found.tokenizer.decode(drawn).decode("utf-8", errors="replace")
    print(json.dumps({"prompt": args.prompt, "tokens": drawn, "text": text, "source": found.source}))
    return
  print(args.prompt, end="", flush=True)
  drawn, shown = [], ""
  for token in tokens:  # a token's text may depend on those before it, and a character may be several tokens
    drawn.append(token)
    text = found.tokenizer.decode(drawn).decode("utf-8", errors="replace")
    whole = text.rstrip("\ufffd")
    if whole.startswith(shown):
      print(whole[len(shown):], end="", flush=True)
      shown = whole
  print(text[len(shown):] if drawn and text.startswith(shown) else "")


def main(argv: list[str] | None = None) -> None:
  argv = sys.argv[1:] if argv is None else argv
  run, parser = (sample, sample_parser()) if argv[:1] == ["sample"] else (export, export_parser())
  args = parser.parse_args(argv[1:] if run is sample else argv)
  jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerators
  try:
    run(args)
  except (ValueError, OSError) as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  main()
