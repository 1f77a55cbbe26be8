"""Tokenises a folder of text into ArrayRecord shards that data.source="array_record" reads.

python -m fgd_jax.data.tokenize --input=books --output=books_tok --tokenizer=bytes --seq_len=256
python -m fgd_jax.data.tokenize --input=books --output=books_bpe --train_tokenizer=4096 --seq_len=256
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Iterator

from absl import app, flags
from tqdm import tqdm

from fgd_jax import command
from fgd_jax.data import records, text

_INPUT = flags.DEFINE_string(
  "input", None, "Folder (or file) with .txt, .md, .py, .rst, .jsonl, .parquet (required).", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write; it must not exist, or be empty (required).", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", '"bytes", or the path of a Hugging Face tokenizer.json.')
_TRAIN = flags.DEFINE_integer("train_tokenizer", None, "Train a byte-level BPE of this vocabulary on the input, and use it.")
_SEQ_LEN = flags.DEFINE_integer(
  "seq_len", None, "Predicted tokens a sequence; the config's seq_len must equal it (required).", required=True
)
_PATTERN = flags.DEFINE_string("pattern", None, f"Comma-separated globs of the files to read; default {text.PATTERN}.")
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "The field of .jsonl and .parquet rows that holds the text.")
_HELDOUT = flags.DEFINE_float(
  "heldout_fraction", 0.05, "Share of the documents held out, chosen by a hash of their content."
)
_SHARD_SIZE = flags.DEFINE_float("shard_size_mb", 256, "Tokens per shard file, in MB.")
_JSON = flags.DEFINE_bool("json", False, "Print what meta.json holds, as JSON.")


def _progress(documents: Iterable[text.Document], what: str, total: int | None) -> Iterator[text.Document]:
  with tqdm(desc=what, total=total, unit="B", unit_scale=True, mininterval=0.5) as bar:

    def counted(document: text.Document) -> Iterator[bytes]:
      for piece in document:
        bar.update(len(piece))
        yield piece

    for document in documents:
      yield counted(document)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    command.refuse(f"Unexpected argument {argv[1]!r}; all options start with --.")
  if _TRAIN.value and flags.FLAGS["tokenizer"].present:
    command.refuse("--tokenizer and --train_tokenizer exclude each other; give one of them.")
  try:
    meta = records.write_folder(
      _INPUT.value,
      _OUTPUT.value,
      seq_len=_SEQ_LEN.value,
      tokenizer_name=_TOKENIZER.value,
      train_tokenizer=_TRAIN.value,
      pattern=_PATTERN.value,
      text_field=_TEXT_FIELD.value,
      heldout_fraction=_HELDOUT.value,
      shard_size_mb=_SHARD_SIZE.value,
      progress=_progress,
    )
  except (ValueError, OSError) as error:
    message = str(error).replace("data.path", "--input").replace("data.pattern", "--pattern")
    sys.exit(f"error: {message}")
  if _JSON.value:
    print(json.dumps(meta))
    return
  print(f"{_OUTPUT.value}: {meta['documents']} documents, {meta['duplicates_dropped']} duplicates dropped")
  for side in records.SIDES:
    part = meta[side]
    print(f"{side:8s} {part['sequences']:>12,} sequences {part['tokens']:>15,} tokens {part['shards']:>6} shards")
  print(f"vocabulary {meta['vocab_size']:,}, unigram loss {meta['unigram_loss']:.4f} nats per token")


if __name__ == "__main__":
  app.run(main, flags_parser=functools.partial(command.parse_flags, usage=(
    "python -m fgd_jax.data.tokenize --input=FOLDER --output=FOLDER --seq_len=N [--tokenizer=FILE | --train_tokenizer=N]")))
