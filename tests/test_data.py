"""Data: the order is a function of (seed, worker, step), train and held-out share nothing, refusals name the remedy."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import grain
import numpy as np
import pytest

from fgd_jax import data
from fgd_jax.data import records, sources, text, tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = "the a worker takes steps then agrees with others on what round gradient mixes slowly".split()


def config(**keys):
  return SimpleNamespace(data=SimpleNamespace(**keys))


def document(i: int, words: int = 60) -> str:
  rng = np.random.RandomState(i)
  return f"document {i}: " + " ".join(rng.choice(WORDS, words)) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """120 text files of about 350 bytes, in two folders."""
  root = tmp_path_factory.mktemp("texts")
  (root / "sub").mkdir()
  for i in range(120):
    (root / ("sub" if i % 2 else "") / f"{i:03d}.txt").write_text(document(i))
  return root


def numbered(count: int, seq_len: int = 7) -> sources.PackedTokens:
  """A source whose sequence i starts with token i * seq_len: the sequence is known by its first token."""
  return sources.PackedTokens(np.arange(count * seq_len + 1, dtype=np.uint32), seq_len)


def ids(tokens: np.ndarray, seq_len: int = 7) -> np.ndarray:
  return tokens[..., 0] // seq_len


# Order.


def test_round_shape_and_purity():
  train = numbered(100)
  rounds = data.round_batches(train, workers=4, inner_steps=3, batch_size=2, seed=5)
  last, first = rounds[9]["tokens"], rounds[0]["tokens"]
  assert first.shape == (4, 3, 2, 8) and first.dtype == np.int32
  np.testing.assert_array_equal(first, data.round_batches(train, 4, 3, 2, 5)[0]["tokens"])
  np.testing.assert_array_equal(last, rounds[9]["tokens"])
  assert (first != data.round_batches(train, 4, 3, 2, 6)[0]["tokens"]).any()
  assert len(rounds) > 10**9


def test_every_sequence_once_an_epoch_and_none_twice():
  sequences, workers, per_round = 96, 4, 6  # 24 sequences a worker, 4 rounds an epoch
  rounds = data.round_batches(numbered(sequences), workers, inner_steps=3, batch_size=2, seed=0)
  epochs = []
  for epoch in range(3):
    seen = np.concatenate([ids(rounds[r]["tokens"]).reshape(workers, per_round) for r in range(4 * epoch, 4 * epoch + 4)], 1)
    assert sorted(seen.reshape(-1)) == list(range(sequences))
    for worker in range(workers):
      assert set(seen[worker] % workers) == {worker}
    epochs.append(seen)
  assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
  # Two workers, or one worker in two epochs, never shuffle alike (places within the share are compared).
  places = [tuple(row // workers) for seen in epochs for row in seen]
  assert len(set(places)) == len(places)


def test_uneven_share_and_batch_straddling_epochs():
  rounds = data.round_batches(numbered(23), workers=3, inner_steps=1, batch_size=3, seed=1)
  seen = np.concatenate([ids(rounds[r]["tokens"])[:, 0] for r in range(24)], axis=1)  # 72 reads a worker
  for worker, share in enumerate((8, 8, 7)):
    for start in range(0, 72 - share, share):
      assert len(set(seen[worker, start : start + share])) == share


def test_steps_do_not_depend_on_the_round_length():
  train = numbered(60)
  short = data.round_batches(train, 2, inner_steps=2, batch_size=3, seed=4)
  long = data.round_batches(train, 2, inner_steps=6, batch_size=3, seed=4)
  joined = np.concatenate([short[r]["tokens"] for r in range(6)], axis=1)
  np.testing.assert_array_equal(joined, np.concatenate([long[r]["tokens"] for r in range(2)], axis=1))


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_iterator_threads_and_resume(threads):
  rounds = data.round_batches(numbered(60), 2, 2, 3, seed=4)
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=3 if threads else 0)
  iterator = iter(rounds.to_iter_dataset(options))
  for r in range(5):
    np.testing.assert_array_equal(next(iterator)["tokens"], rounds[r]["tokens"])
  state = iterator.get_state()
  assert state == {"next_index": 5}
  again = iter(rounds.to_iter_dataset(options))
  again.set_state(state)
  for r in range(5, 8):
    np.testing.assert_array_equal(next(again)["tokens"], rounds[r]["tokens"])


def test_random_access_from_many_threads():
  rounds = data.round_batches(numbered(60), 2, 2, 3, seed=4)
  expected, got = [rounds[r]["tokens"] for r in range(12)], {}
  threads = [threading.Thread(target=lambda r=r: got.update({r: rounds[r]["tokens"]})) for r in reversed(range(12))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for r in range(12):
    np.testing.assert_array_equal(got[r], expected[r])


def test_any_indexable_is_a_source():
  plain = [np.arange(i, i + 8, dtype=np.int64) for i in range(40)]
  tokens = data.round_batches(plain, 2, 2, 2, seed=0)[0]["tokens"]
  assert tokens.dtype == np.int32 and tokens.shape == (2, 2, 2, 8)
  assert data.heldout_batches(plain, 4, 2)["tokens"].dtype == np.int32


def test_order_refuses_what_the_data_cannot_give():
  with pytest.raises(ValueError, match=r"workers=8 leaves a worker 2 of 20 .* batch_size=3"):
    data.round_batches(numbered(20), workers=8, inner_steps=1, batch_size=3, seed=0)
  with pytest.raises(ValueError, match="inner_steps=0"):
    data.round_batches(numbered(20), workers=1, inner_steps=0, batch_size=3, seed=0)


def test_heldout_batches_are_fixed_and_spread():
  tokens = data.heldout_batches(numbered(100), batch_size=2, batches=5)["tokens"]
  assert tokens.shape == (5, 2, 8) and tokens.dtype == np.int32
  np.testing.assert_array_equal(ids(tokens).reshape(-1), np.arange(10) * 10)
  with pytest.raises(ValueError, match=r"eval_batches=60 of batch_size=2 need 120 .* there are 100"):
    data.heldout_batches(numbered(100), 2, 60)


# Text folders.


def test_windows_have_stride_seq_len(folder):
  train = data.load(config(path=str(folder)), seq_len=32, seed=0).train
  for i in range(len(train) - 1):
    assert train[i].dtype == np.int32 and train[i].shape == (33,)
    assert train[i][-1] == train[i + 1][0]
  np.testing.assert_array_equal(train[-1], train[len(train) - 1])
  with pytest.raises(IndexError):
    train[len(train)]


def whole(source) -> bytes:
  return bytes(np.concatenate([source[i][:-1] for i in range(len(source))]).astype(np.uint8))


def test_heldout_shares_no_document_with_train(folder, tmp_path):
  corpus = data.load(config(path=str(folder), heldout_fraction=0.3), seq_len=16, seed=0)
  train, heldout = (set(whole(side).split(b"\0")[:-1]) for side in corpus[:2])
  assert train and heldout and not train & heldout
  everything = {document(i).encode() for i in range(120)}
  assert train | heldout <= everything and len(train | heldout) >= 118  # the last, unfilled window of a side is cut off
  # More files, among them copies under other names, move no document to the other side.
  for i in range(150):
    (tmp_path / f"{999 - i}.md").write_text(document(i))
    (tmp_path / f"copy{i}.txt").write_text(document(i))
  grown = data.load(config(path=str(tmp_path), heldout_fraction=0.3), seq_len=16, seed=0)
  grown_train, grown_heldout = (whole(side).split(b"\0")[:-1] for side in grown[:2])
  assert len(set(grown_train)) == len(grown_train) and not set(grown_train) & set(grown_heldout)
  assert not train & set(grown_heldout) and not heldout & set(grown_train)


def test_corpus_figures(folder):
  corpus = data.load(config(path=str(folder)), seq_len=32, seed=0)
  assert corpus.vocab_size == 256 and corpus.train_tokens == len(corpus.train) * 32
  seen, target = ([t for i in range(len(side)) for t in side[i][1:]] for side in corpus[:2])
  smoothed = [(seen.count(t) + 1) / (len(seen) + 256) for t in range(256)]
  expected = -sum(math.log(smoothed[t]) for t in target) / len(target)
  assert corpus.unigram_loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("as_file", [False, True])
def test_one_document_holds_out_its_tail(tmp_path, as_file):
  letters = "".join(f"line {i} é\n" for i in range(2000)).encode()
  (tmp_path / "one.txt").write_bytes(letters)
  corpus = data.load(config(path=str(tmp_path / "one.txt" if as_file else tmp_path), heldout_fraction=0.1), 16, 0)
  train, heldout = whole(corpus.train), whole(corpus.heldout)
  assert letters.startswith(train) and heldout.rstrip(b"\0") in letters[len(train) :]
  assert len(heldout) == pytest.approx(0.1 * len(letters), rel=0.05)


def test_files_found_and_skipped(tmp_path):
  (tmp_path / "b").mkdir()
  (tmp_path / ".hidden").mkdir()
  for name in ("z.txt", "b/a.md", "b/c.bin", ".hidden/x.txt", ".y.txt", "empty.txt"):
    (tmp_path / name).write_text("" if name == "empty.txt" else name)
  os.symlink(tmp_path, tmp_path / "b" / "loop")
  os.symlink(tmp_path / "nowhere.txt", tmp_path / "broken.txt")
  found = [os.path.relpath(path, tmp_path) for path in text.find_files(tmp_path)]
  assert found == ["b/a.md", "empty.txt", "z.txt"]
  assert [os.path.basename(path) for path in text.find_files(tmp_path, "*.bin, b/*.md")] == ["a.md", "c.bin"]
  plan = text.survey(text.read_documents(text.find_files(tmp_path)), 0.5)
  assert plan.documents == 2 and plan.duplicates == 0


def test_bad_utf8_empty_files_and_max_bytes(tmp_path):
  raw = bytes(range(1, 256)) * 20
  (tmp_path / "raw.txt").write_bytes(raw)
  (tmp_path / "empty.txt").write_bytes(b"")
  corpus = data.load(config(path=str(tmp_path), max_bytes=2000), 16, 0)
  assert whole(corpus.train) in raw and corpus.train_tokens <= 2000
  encoder = tokenizer.load("bytes")
  assert encoder.decode(encoder.encode_batch([raw])[0]) == raw
  for limit in range(1, 12):
    cut = b"".join(b"".join(document) for document in text.capped([[b"a\xc3\xa9"], [b"\xe2\x82\xacz", b"end"]], limit))
    assert len(cut) <= limit and cut.decode() == "aé€zend"[: len(cut.decode())]


def test_long_documents_pass_in_pieces(tmp_path, monkeypatch):
  monkeypatch.setattr(text, "PIECE", 64)
  for name, body in {"lines.txt": "a line of text\n" * 50, "accents.txt": "é€" * 300, "exact.txt": "x" * 128}.items():
    (tmp_path / name).write_text(body)
    (pieces,) = map(list, text.read_documents([str(tmp_path / name)]))
    assert b"".join(pieces).decode() == body and max(map(len, pieces)) <= 64
    assert all(piece.decode() for piece in pieces)


def test_standard_library_is_the_default():
  found = text.find_files(None)
  assert len(found) > 300 and all(path.endswith(".py") for path in found)
  assert not any(part in path for path in found for part in ("/test/", "/tests/", "site-packages"))
  corpus = data.load(config(max_bytes=300_000), seq_len=64, seed=0)
  assert 250_000 < corpus.train_tokens < 300_000 and 2.5 < corpus.unigram_loss < 4.0


def test_bare_data_config_and_ml_collections(folder):
  from ml_collections import config_dict

  full = config_dict.ConfigDict({"data": {"source": "text", "path": str(folder), "pattern": config_dict.placeholder(str)}})
  for given in (full, full.data):
    assert len(data.load(given, 32, 0).train) == len(data.load(config(path=str(folder)), 32, 0).train)


def test_text_errors(tmp_path, folder):
  with pytest.raises(FileNotFoundError, match="data.path='/no/such' does not exist"):
    data.load(config(path="/no/such"), 16, 0)
  with pytest.raises(FileNotFoundError, match="no file that matches"):
    data.load(config(path=str(tmp_path)), 16, 0)
  with pytest.raises(ValueError, match="seq_len=100000 is longer than the (training|held-out) text"):
    data.load(config(path=str(folder)), 100_000, 0)
  with pytest.raises(ValueError, match="data.source='csv' is unknown"):
    data.load(config(source="csv"), 16, 0)
  with pytest.raises(ValueError, match="data.heldout_fraction=1.5"):
    data.load(config(heldout_fraction=1.5), 16, 0)
  with pytest.raises(ValueError, match="data.max_bytes=0"):
    data.load(config(path=str(folder), max_bytes=0), 16, 0)
  with pytest.raises(FileNotFoundError, match="data.tokenizer='none.json' is not a file"):
    data.load(config(path=str(folder), tokenizer="none.json"), 16, 0)
  (tmp_path / "broken.json").write_text("{}")
  with pytest.raises(ValueError, match="cannot be read as a Hugging Face tokenizer.json"):
    data.load(config(path=str(folder), tokenizer=str(tmp_path / "broken.json")), 16, 0)


def test_row_errors_name_the_fields(tmp_path):
  import pyarrow as pa
  import pyarrow.parquet as pq

  rows = tmp_path / "rows.jsonl"
  for line, message in (
    (
      '{"title": 1, "body": "x"}',
      r"rows.jsonl, line 2: no field data.text_field='text'; its fields are \['body', 'title'\]",
    ),
    ('{"text": 3}', "line 2: field 'text' is a int, not a string"),
    ("{oops", "line 2: not a JSON object"),
  ):
    rows.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
      data.load(config(path=str(tmp_path)), 4, 0)
  rows.unlink()
  pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "rows.parquet")
  with pytest.raises(ValueError, match=r"no column data.text_field='text'; its columns are \['body', 'n'\]"):
    data.load(config(path=str(tmp_path)), 4, 0)
  with pytest.raises(ValueError, match="column 'n' is int64, not text"):
    data.load(config(path=str(tmp_path), text_field="n"), 4, 0)
  (tmp_path / "rows.parquet").write_bytes(b"not parquet at all")
  with pytest.raises(ValueError, match="cannot be read as parquet"):
    data.load(config(path=str(tmp_path)), 4, 0)


# Synthetic.


def test_synthetic_is_seeded_and_learnable():
  corpus, same, other = (data.load(config(source="synthetic", vocab_size=64), 32, seed) for seed in (0, 0, 1))
  sample = corpus.train.gather(np.arange(2000))
  np.testing.assert_array_equal(sample[7], same.train[7])
  assert (sample[:50] != other.train.gather(np.arange(50))).any()
  assert sample.min() >= 0 and sample.max() < 64 and corpus.vocab_size == 64
  assert not set(map(bytes, sample)) & set(map(bytes, corpus.heldout.gather(np.arange(2000))))
  pairs = np.zeros((64, 64)) + 1e-9
  np.add.at(pairs, (sample[:, :-1].reshape(-1), sample[:, 1:].reshape(-1)), 1)
  joint = pairs / pairs.sum()
  bigram = -(joint * np.log(pairs / pairs.sum(1, keepdims=True))).sum()
  assert bigram < 1.5 and corpus.unigram_loss > bigram + 1.0
  with pytest.raises(ValueError, match="data.vocab_size=1"):
    data.load(config(source="synthetic", vocab_size=1), 32, 0)


# The tokenise command and its folders.


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
  """Text, jsonl and parquet side by side; some documents stand in two of them."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  root = tmp_path_factory.mktemp("mixed")
  for i in range(40):
    (root / f"{i}.txt").write_text(document(i, 120) + "naïve €\n")
  rows = [document(i, 120) + "naïve €\n" for i in range(30, 80)]
  (root / "rows.jsonl").write_text("".join(json.dumps({"text": row, "id": i}) + "\n\n" for i, row in enumerate(rows)))
  pq.write_table(pa.table({"id": [1, 2], "text": [document(500), None]}), root / "rows.parquet")
  return root


def command(*arguments: str, fails: bool = False) -> str:
  run = [sys.executable, "-m", "fgd_jax.data.tokenize", *arguments]
  done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
  assert (done.returncode != 0) == fails, done.stderr
  return done.stderr if fails else done.stdout


def test_tokenise_command_with_bytes(mixed, tmp_path):
  out = tmp_path / "out"
  arguments = (f"--input={mixed}", f"--output={out}", "--tokenizer=bytes", "--seq_len=32", "--shard_size_mb=0.01")
  meta = json.loads(command(*arguments, "--heldout_fraction=0.2", "--json"))
  assert meta["documents"] == 81 and meta["duplicates_dropped"] == 10 and meta["dtype"] == "|u1"
  names = sorted(os.listdir(out))
  shards = meta["train"]["shards"]
  assert shards > 2 and f"train-00000-of-{shards:05d}.array_record" in names and "meta.json" in names
  assert os.listdir(tmp_path) == ["out"]  # no temporary folder stays
  corpus = data.load(config(source="array_record", path=str(out)), 32, 0)
  direct = data.load(config(path=str(mixed), heldout_fraction=0.2), 32, 0)
  for side in ("train", "heldout"):
    written, packed = getattr(corpus, side), getattr(direct, side)
    assert len(written) == len(packed) == meta[side]["sequences"]
    np.testing.assert_array_equal(written.gather(np.arange(len(written))), packed.gather(np.arange(len(packed))))
  assert corpus[2:] == direct[2:]
  assert "is not an empty folder" in command(*arguments, fails=True)


def test_tokenise_command_trains_a_bpe(mixed, tmp_path):
  out = tmp_path / "bpe"
  printed = command(f"--input={mixed}", f"--output={out}", "--train_tokenizer=400", "--seq_len=32", "--heldout_fraction=0.2")
  assert "vocabulary" in printed and "sequences" in printed
  corpus = data.load(config(source="array_record", path=str(out)), 32, 0)
  encoder = tokenizer.load(str(out / "tokenizer.json"))
  assert corpus.vocab_size == encoder.vocab_size <= 400
  tokens = corpus.train[0]
  assert tokens.dtype == np.int32 and "document" in encoder.decode(tokens).decode()
  sample = (document(3) + "naïve € \x00\n\n  x").encode()
  assert encoder.decode(encoder.encode_batch([sample])[0]) == sample
  assert encoder.separator.tolist() == [0]
  # The same tokenizer on the same text, in memory: the same sequences.
  keys = {"path": str(mixed), "tokenizer": str(out / "tokenizer.json"), "heldout_fraction": 0.2}
  direct = data.load(config(**keys), 32, 0)
  np.testing.assert_array_equal(direct.train.gather(np.arange(9)), corpus.train.gather(np.arange(9)))
  assert len(direct.train) == len(corpus.train) and direct.unigram_loss == corpus.unigram_loss


def test_tokenised_folder_is_reproducible(mixed, tmp_path):
  for name in ("a", "b"):
    records.write_folder(str(mixed), str(tmp_path / name), seq_len=16, train_tokenizer=300, heldout_fraction=0.2)
  names = sorted(os.listdir(tmp_path / "a"))
  assert names == sorted(os.listdir(tmp_path / "b"))
  for name in ("meta.json", "tokenizer.json"):
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
  first, second = (data.load(config(source="array_record", path=str(tmp_path / name)), 16, 0) for name in ("a", "b"))
  everything = np.arange(len(first.train))
  np.testing.assert_array_equal(first.train.gather(everything), second.train.gather(everything))


def test_streamed_writer_equals_packing(tmp_path, monkeypatch):
  tokens = np.random.RandomState(0).randint(0, 1000, 5003)
  writer = records.ShardWriter(str(tmp_path), "train", 10, 1000, shard_bytes=22 * 100)
  for start in range(0, len(tokens), 7):
    writer.add(tokens[start : start + 7])
    if start % 70 == 0:
      writer._write_pending()
  writer.finish()
  packed = sources.PackedTokens(tokens, 10)
  assert writer.sequences == len(packed) == 500 and writer.shards == 5
  np.testing.assert_array_equal(writer.counts, packed.target_counts(1000))
  meta = {"dtype": "<u2", "seq_len": 10, "vocab_size": 1000}
  source = records.RecordTokens(records._shards(str(tmp_path), "train", 5), meta)
  np.testing.assert_array_equal(source.gather(np.arange(500)), packed.gather(np.arange(500)))
  meta["vocab_size"] = 500
  with pytest.raises(ValueError, match=r"outside the vocabulary \[0, 500\); set data.tokenizer"):
    source.gather(np.arange(500))


def test_array_record_errors(mixed, tmp_path):
  with pytest.raises(ValueError, match="needs data.path"):
    data.load(config(source="array_record"), 16, 0)
  with pytest.raises(FileNotFoundError, match="is not a folder"):
    data.load(config(source="array_record", path="/no/such"), 16, 0)
  with pytest.raises(FileNotFoundError, match="holds no meta.json"):
    data.load(config(source="array_record", path=str(tmp_path)), 16, 0)
  out = tmp_path / "out"
  records.write_folder(str(mixed), str(out), seq_len=32, heldout_fraction=0.2)
  for seq_len in (16, 64):
    with pytest.raises(ValueError, match=f"written with seq_len=32 and the config has seq_len={seq_len}"):
      data.load(config(source="array_record", path=str(out)), seq_len, 0)
  meta = json.loads((out / "meta.json").read_text())
  (out / "meta.json").write_text(json.dumps({**meta, "train": {**meta["train"], "sequences": 1}}))
  with pytest.raises(ValueError, match="meta.json counts 1"):
    data.load(config(source="array_record", path=str(out)), 32, 0)
  (out / "meta.json").write_text(json.dumps({**meta, "format": 99}))
  with pytest.raises(ValueError, match="format 99"):
    data.load(config(source="array_record", path=str(out)), 32, 0)
  (out / "meta.json").write_text(json.dumps(meta))
  (out / "train-00000-of-00001.array_record").unlink()
  with pytest.raises(FileNotFoundError, match="train-00000-of-00001.array_record is missing"):
    data.load(config(source="array_record", path=str(out)), 32, 0)


def test_a_failed_tokenise_leaves_nothing(mixed, tmp_path):
  for options, message in (
    ({"seq_len": 10**6}, "seq_len=1000000 is longer"),
    ({"seq_len": 8, "train_tokenizer": 100}, "--train_tokenizer=100 must be above 256"),
    ({"seq_len": 8, "text_field": "body"}, "no field"),
    ({"seq_len": 0}, "seq_len=0"),
  ):
    with pytest.raises(ValueError, match=message):
      records.write_folder(str(mixed), str(tmp_path / "out"), **options)
    assert os.listdir(tmp_path) == []


# TFDS.

_READ_BY_PATH = """
import sys, json
from types import SimpleNamespace
from fgd_jax import data
corpus = data.load(SimpleNamespace(source="tfds", path=sys.argv[1], heldout_fraction=0.2), int(sys.argv[2]), 0)
rounds = data.round_batches(corpus.train, 2, 2, 2, 0)
shape = list(rounds[0]["tokens"].shape)
print(json.dumps([shape, len(corpus.train), len(corpus.heldout), "tensorflow" in sys.modules]))
"""


def prepare(root, dataset: str, features, splits) -> str:
  """Writes a TFDS dataset of `splits` {name: rows} under `root` and returns the folder of its version."""
  import tensorflow_datasets as tfds

  class Prepared(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    name = dataset
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
      return {split: enumerate(rows) for split, rows in splits.items()}

    def _generate_examples(self):
      return iter(())

  builder = Prepared(data_dir=str(root), file_format="array_record")
  builder.download_and_prepare()
  return str(builder.data_path)


@pytest.fixture(scope="module")
def tfds_root(tmp_path_factory):
  return tmp_path_factory.mktemp("tfds")


def test_tfds_text_by_path_without_tensorflow(tfds_root):
  import tensorflow_datasets as tfds

  rows = [{"text": document(i % 50), "n": i} for i in range(60)]
  path = prepare(tfds_root, "tiny_text", {"text": tfds.features.Text(), "n": np.int64}, {"train": rows})
  run = [sys.executable, "-c", _READ_BY_PATH, path, "16"]
  done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
  assert done.returncode == 0, done.stderr
  shape, _, _, imported = json.loads(done.stdout.splitlines()[-1])
  assert shape == [2, 2, 2, 17] and imported is False
  corpus = data.load(config(source="tfds", path=path, heldout_fraction=0.2), 16, 0)
  train, heldout = (whole(side).split(b"\0")[:-1] for side in corpus[:2])
  assert len(set(train)) == len(train) and heldout and not set(train) & set(heldout)
  by_name = data.load(
    config(source="tfds", tfds_name="tiny_text", tfds_data_dir=str(tfds_root), heldout_fraction=0.2), 16, 0
  )
  assert len(by_name.train) == len(corpus.train) and by_name.unigram_loss == corpus.unigram_loss
  capped = data.load(config(source="tfds", path=path, heldout_fraction=0.2, max_bytes=5000), 16, 0)
  assert capped.train_tokens <= 4100
  with pytest.raises(ValueError, match=r"data.tfds_split='dev' is not in .* \['train'\]"):
    data.load(config(source="tfds", path=path, tfds_split="dev"), 16, 0)
  with pytest.raises(ValueError, match="feature 'n' of .* neither text nor integer tokens"):
    data.load(config(source="tfds", path=path, text_field="n"), 16, 0)
  with pytest.raises(ValueError, match=r"no feature data.text_field='body', nor 'tokens'; its features are \['n', 'text'\]"):
    data.load(config(source="tfds", path=path, text_field="body"), 16, 0)


def test_tfds_validation_split_loses_what_train_has(tfds_root):
  import tensorflow_datasets as tfds

  splits = {
    "train": [{"text": document(i)} for i in range(30)],
    "validation": [{"text": document(i)} for i in range(20, 40)],
  }
  path = prepare(tfds_root, "with_validation", {"text": tfds.features.Text()}, splits)
  corpus = data.load(config(source="tfds", path=path), 16, 0)
  train, heldout = (set(whole(side).split(b"\0")[:-1]) for side in corpus[:2])
  assert not train & heldout and len(train) >= 29 and 9 <= len(heldout) <= 10


def test_tfds_tokens_by_random_access(tfds_root):
  import tensorflow_datasets as tfds

  rows = [{"tokens": np.arange(i, i + 17, dtype=np.int32)} for i in range(40)]
  path = prepare(tfds_root, "tiny_tokens", {"tokens": tfds.features.Tensor(shape=(17,), dtype=np.int32)}, {"train": rows})
  corpus = data.load(config(source="tfds", path=path, heldout_fraction=0.25), 16, 0)
  assert (len(corpus.train), len(corpus.heldout), corpus.train_tokens) == (30, 10, 480)
  assert math.isnan(corpus.unigram_loss)
  first = {int(side[i][0]) for side in corpus[:2] for i in range(len(side))}
  assert first == set(range(40)) and corpus.train[3].dtype == np.int32
  with pytest.raises(ValueError, match="seq_len=8 needs rows of 9 tokens .* set seq_len=16"):
    data.load(config(source="tfds", path=path), 8, 0)
  rows[0] = {"tokens": np.full(17, 256, np.int32)}
  path = prepare(tfds_root, "beyond", {"tokens": tfds.features.Tensor(shape=(17,), dtype=np.int32)}, {"train": rows})
  corpus = data.load(config(source="tfds", path=path), 16, 0)
  with pytest.raises(ValueError, match=r"token 256 in .* outside the vocabulary \[0, 256\)"):
    data.heldout_batches(corpus.train, len(corpus.train), 1)


def test_tfds_errors(tfds_root, tmp_path):
  import tensorflow_datasets as tfds

  path = prepare(tfds_root, "to_convert", {"text": tfds.features.Text()}, {"train": [{"text": "x" * 99}]})
  info = os.path.join(path, "dataset_info.json")
  with open(info, encoding="utf-8") as file:
    stored = file.read()
  with open(info, "w", encoding="utf-8") as file:
    file.write(stored.replace("array_record", "tfrecord"))
  with pytest.raises(ValueError, match=r"is stored as tfrecord.*file_format='array_record'"):
    data.load(config(source="tfds", path=path), 16, 0)
  with pytest.raises(ValueError, match="needs data.path .* or data.tfds_name"):
    data.load(config(source="tfds"), 16, 0)
  with pytest.raises(FileNotFoundError, match="is not a folder"):
    data.load(config(source="tfds", path="/no/such"), 16, 0)
  with pytest.raises(FileNotFoundError, match="holds no dataset_info.json"):
    data.load(config(source="tfds", path=str(tmp_path)), 16, 0)
  with pytest.raises(ValueError, match="data.tfds_name='no_such_set' is unknown to tfds"):
    data.load(config(source="tfds", tfds_name="no_such_set", tfds_data_dir=str(tmp_path)), 16, 0)
  with pytest.raises(FileNotFoundError, match="data.tfds_name='lm1b' is not prepared at"):
    data.load(config(source="tfds", tfds_name="lm1b", tfds_data_dir=str(tmp_path)), 16, 0)


def test_heavy_packages_are_imported_only_where_used():
  code = (
    "import sys; from types import SimpleNamespace as N; from fgd_jax import data;"
    "data.load(N(source='synthetic', vocab_size=16), 8, 0); data.load(N(max_bytes=100000), 8, 0);"
    "print([m for m in ('tensorflow', 'tensorflow_datasets', 'pyarrow', 'tokenizers') if m in sys.modules])"
  )
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env)
  assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr
