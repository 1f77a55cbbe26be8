"""Trains a language model: config -> mesh -> state -> rounds, with evaluation, measurement, checkpoints and logs.

    python -m fgd_jax.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.rounds=300]

Started again with the same command, a run that was stopped anywhere goes on where its last checkpoint was, bit for bit;
with another mesh or number of workers it goes on as docs/resume.md says.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict, config_flags

import fgd_jax as fgd
from fgd_jax import aot, data, export, measure, models, resize, sharding
from fgd_jax import config as configs
from fgd_jax.checkpoint import Checkpoints, Progress, refuse_other_config
from fgd_jax.report import curves
from fgd_jax.round import State
from fgd_jax.runlog import RunLog, read_lines, show_own_logs

PyTree = Any
LOCK_FILE = ".lock"
ADVICE = ("Nothing was saved over earlier checkpoints. Try a lower inner.lr or method.outer_lr in a new --workdir, or look "
          "at that worker's data.")


class NonFiniteError(RuntimeError):
  """The loss or the state of a worker is no longer finite."""


def train(config: ConfigDict, workdir: str) -> dict[str, Any]:
  """Runs `config` in the folder `workdir` to its last round, resuming what is there; returns the summary.

  Raises:
    ValueError, FileNotFoundError: what cannot work, in one sentence, before the first round.
    NonFiniteError: a non-finite loss or state, naming worker and step; nothing is saved over the last good checkpoint.
  """
  configs.validate(config)
  with claimed(workdir):
    return _train(config, workdir)


def _train(config: ConfigDict, workdir: str) -> dict[str, Any]:
  summary = recognise_run(config, workdir)
  if summary is not None:
    logging.info("The run in %s is finished (%d rounds, held-out loss %.4f); nothing to do. For a longer run choose "
                 "another --workdir.", workdir, summary["rounds"], summary["eval_loss"])
    return summary

  # --- data, model, method -------------------------------------------------------------------------------------------
  configs.set_cpu_devices(config)
  workers = configs.make_workers(config)
  corpus = data.load(config.data, config.seq_len, config.seed)
  data.round_batches(corpus.train, config.workers, config.inner_steps, config.batch_size, config.seed)  # or refuses
  heldout = data.heldout_batches(corpus.heldout, config.eval_batch_size, config.eval_batches)["tokens"]
  model = models.make(configs.make_model_config(config, corpus.vocab_size))
  probe = jnp.asarray(heldout.reshape(-1, heldout.shape[-1])[:config.measure_sequences, :-1])
  measures = (consensus_by_block, js_of(model.apply, probe)) if config.measure_every else ()
  init, round_fn = fgd.build_round(
      configs.make_method(config), model.loss, configs.make_inner_optimizer(config), workers=workers, seed=config.seed,
      accumulate=config.accumulate, measure=measures, overlap=config.overlap.form,
      worker_weights=configs.worker_weights(config), **sharding.inside_worker(workers.mesh))

  # --- state: fresh, or the newest checkpoint ------------------------------------------------------------------------
  params_shape = jax.eval_shape(model.init, jax.random.key(config.seed))
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), config.checkpoint_keep, config)
  found = checkpoints.found()
  if found is None:
    state = init(first_params(config, model, params_shape))
    iterator = read_rounds(config, corpus, checkpoints.progress)
  elif found[0].workers == config.workers:
    checkpoints.progress = found[1]
    iterator = read_rounds(config, corpus, checkpoints.progress)
    state = checkpoints.restore(round_fn.abstract_state(params_shape), iterator)
    logging.info("Resuming at round %d of %d.", state.round, config.rounds)
  else:
    state = restore_other_workers(config, found[0], checkpoints, round_fn, model, params_shape, workers)
    checkpoints.progress = found[1].changed(int(state.round), config)
    iterator = read_rounds(config, corpus, checkpoints.progress)
  write_config(config, workdir)
  progress, taken, start = checkpoints.progress, configs.steps_of_workers(config), int(state.round)
  tokens_per_round = sum(taken) * config.batch_size * config.seq_len
  tokens = [progress.tokens + (r - progress.since) * tokens_per_round for r in range(config.rounds + 1)]  # after r rounds
  logging.info("%s parameters, %s, method %s, %d x %s tokens a round on %s (%s).",
               f"{models.count_params(params_shape):,}", workers, config.method.name, config.rounds,
               f"{tokens_per_round:,}", workers.platform, f"unigram loss {corpus.unigram_loss:.3f}")

  # --- compile, once -------------------------------------------------------------------------------------------------
  first = jax.eval_shape(lambda: jnp.zeros((config.workers, config.inner_steps, config.batch_size, config.seq_len + 1),
                                           jnp.int32))
  plan = round_fn.plan({"tokens": first})
  logging.info("Overlap form %s, XLA options %s.", plan.form, plan.options or "none")
  if plan.warning:
    logging.warning("%s", plan.warning)
  logging.info("Compiling (half a minute or more on two cores) ...")
  began = time.time()
  executables = round_fn.compile(state, {"tokens": first}, measured=(False, True) if config.measure_every else (False,))
  evaluate = make_evaluation(model.loss, heldout, workers)
  before = evaluate(round_fn.eval_params(state), state.params)
  all_finite = jax.jit(finite_by_worker)
  logging.info("Compiled %d executable(s) for the rounds in %.1f s; held-out loss is %.3f now.", len(executables),
               time.time() - began, before["eval_loss"])
  if workers.platform != "cpu" and plan.form != "none":
    report_overlap(executables, workers, round_fn.method, config.inner_steps)

  log = RunLog(workdir, start, (tokens[start], tokens[-1]))

  # --- rounds. Order matters: save before the iterator advances, read a round's metrics after the next is dispatched -
  pending: dict[str, Any] | None = None
  profile = Profile(configs.profiled_rounds(config), os.path.join(workdir, "profile"))
  try:
    while int(state.round) < config.rounds:
      done = int(state.round)
      profile.at(done + 1, state)
      if done > start and config.checkpoint_every and done % config.checkpoint_every == 0:
        flush(pending, log, config)
        pending = None
        refuse_non_finite(all_finite(state), done * config.inner_steps)
        checkpoints.save(state, iterator, tokens[done])
      batches = next(iterator)
      measured = due(done + 1, config.measure_every, config.rounds)
      with jax.profiler.StepTraceAnnotation("round", step_num=done + 1):
        state, metrics = round_fn(state, batches, measured=measured)
      if due(done + 1, config.eval_every, config.rounds) or done + 1 == config.rounds:
        metrics |= evaluate(round_fn.eval_params(state), state.params)
      record = {"round": done + 1, "step": (done + 1) * config.inner_steps, "tokens": tokens[done + 1]}
      previous, pending = pending, {"record": record, "metrics": metrics, "tokens": tokens_per_round, "taken": taken}
      flush(previous, log, config)
    flush(pending, log, config)
    profile.at(config.rounds + 1, state)
    refuse_non_finite(all_finite(state), config.rounds * config.inner_steps)
    checkpoints.save(state, iterator, tokens[-1])
  finally:
    profile.close()
    log.close()
    checkpoints.close()

  # --- summary -------------------------------------------------------------------------------------------------------
  summary = summarise(config, workdir, {
      "parameters": models.count_params(params_shape), "unigram_loss": corpus.unigram_loss,
      "train_tokens_available": corpus.train_tokens, "placement": repr(workers)})
  logging.info("Done: held-out loss %.4f (unigram %.4f). Figures in %s, plot in %s.", summary["eval_loss"],
               summary["unigram_loss"], os.path.join(workdir, "summary.json"), os.path.join(workdir, curves.FILE_NAME))
  return summary


def due(rounds: int, every: int, last: int) -> bool:
  """Whether something done every `every` rounds (0: never) is done after `rounds` rounds; the last round counts."""
  return bool(every) and (rounds % every == 0 or rounds == last)


def first_params(config: ConfigDict, model: models.Model, params_shape: PyTree) -> PyTree:
  """Fresh parameters, or those of config.init_from in the model's own dtype."""
  if config.init_from is None:
    return jax.jit(model.init)(jax.random.key(config.seed))
  found = export.read_folder(config.init_from, config.model.scan_layers)
  for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size", "rope_theta", "norm_eps", "tied"):
    ours, theirs = getattr(model.config, key), getattr(found.model, key)
    if ours != theirs:
      raise ValueError(f"init_from={config.init_from!r} has {key}={theirs} and this run model.{key}={ours}; set "
                       f"model.{key}={theirs}, or start from another folder.")
  return jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), found.params, params_shape)


def read_rounds(config: ConfigDict, corpus: data.Corpus, progress: Progress) -> Iterator[dict[str, np.ndarray]]:
  """The batches of the rounds since the number of workers changed last; its position is part of checkpoints."""
  rounds = data.round_batches(corpus.train, config.workers, config.inner_steps, config.batch_size, config.seed,
                              progress.earlier)
  return iter(rounds.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def restore_other_workers(config: ConfigDict, saved: ConfigDict, checkpoints: Checkpoints, round_fn: fgd.Round,
                          model: models.Model, params_shape: PyTree, workers: fgd.Workers) -> State:
  """The newest checkpoint, of the number of workers in `saved`, as the state of the workers of `config`."""
  _, as_saved = fgd.build_round(configs.make_method(saved), model.loss, configs.make_inner_optimizer(saved),
                                workers=fgd.Workers(saved.workers), seed=saved.seed,
                                worker_weights=configs.worker_weights(saved))
  state = checkpoints.restore(resize.spread(as_saved.abstract_state(params_shape), workers))
  state, fresh = resize.resize(state, round_fn, config.resume.workers)
  logging.warning("Resuming at round %d of %d with workers=%d in place of %d (resume.workers=%s: %s); data are dealt anew, "
                  "and no sequence is read twice in a pass.", state.round, config.rounds, config.workers, saved.workers,
                  config.resume.workers, resize.describe(config.resume.workers, saved.workers, config.workers))
  if fresh:
    logging.warning("Parts of the method's state that the checkpoint lacks start afresh at the mean parameters: %s.",
                    ", ".join(fresh[:5]) + (", ..." if len(fresh) > 5 else ""))
  if config.method.name == "local":
    logging.warning("Workers of method local never agreed, so their mean is a model that nobody trained; "
                    "resume.workers=first keeps single models when workers leave.")
  return state


def report_overlap(executables: dict[Any, Any], workers: fgd.Workers, method: fgd.methods.Method, steps: int) -> None:
  """Logs what the compiler made of Mix1, and warns where it is not beside the inner steps."""
  try:
    schedules = [aot.read_round(run.as_text(), workers, method, steps) for (measured, _), run in executables.items()
                 if not measured]
  except Exception as e:  # the text is the compiler's own and changes with its version; training does not depend on it
    logging.warning("The compiled schedule could not be read (%s).", e)
    return
  worst = max(schedules, key=lambda s: s.total(aot.EXPOSED))
  megabytes = [worst.total(place) / 1e6 for place in (aot.OVERLAPPED, aot.EXPOSED, aot.BLOCKING)]
  logging.info("Compiled schedule, bytes a device and round: %.1f MB beside the inner steps, %.1f MB of Mix1 exposed, "
               "%.1f MB blocking.", *megabytes)
  if megabytes[1]:
    logging.warning("Mix1 blocks: %.1f MB a round are not beside the inner steps. python -m fgd_jax.aot shows where; "
                    "another overlap.form or method.mix1 may overlap (docs/overlap.md).", megabytes[1])


class Profile:
  """Writes a jax profiler trace of chosen rounds to a folder (TensorBoard's profile plugin, and a Perfetto file).

  Args:
    rounds: numbers of completed rounds, counted from 1.
    folder: where the trace goes.
  """

  def __init__(self, rounds: range, folder: str):
    self._rounds, self._folder, self._running = rounds, folder, False

  def at(self, number: int, state: State) -> None:
    """Called before round `number` starts; waits for the rounds before it where the trace begins or ends."""
    if self._running != (number in self._rounds):
      jax.block_until_ready(state)
      self.close()
      if number in self._rounds:
        logging.info("Profiling rounds %d to %d into %s.", self._rounds[0], self._rounds[-1], self._folder)
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self._running = True

  def close(self) -> None:
    if self._running:
      self._running = False
      jax.profiler.stop_trace()


# --- the run's folder ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed(workdir: str) -> Iterator[None]:
  """Makes the folder and holds its lock, which ends with the process however that ends.

  Raises:
    ValueError: a folder that holds something else, or that another process holds.
    OSError: the folder cannot be made or written.
  """
  os.makedirs(workdir, exist_ok=True)
  if not os.path.exists(os.path.join(workdir, "config.json")):
    ours = {"checkpoints", "tensorboard", "profile", "metrics.jsonl", "summary.json", curves.FILE_NAME, LOCK_FILE}
    if strangers := sorted(set(os.listdir(workdir)) - ours):
      raise ValueError(f"--workdir={workdir} holds {strangers[0]!r} and no config.json; choose an empty or new folder.")
  with open(os.path.join(workdir, LOCK_FILE), "w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise ValueError(f"Another process is running in --workdir={workdir}; stop it or choose another folder.") from e
    except OSError:  # a file system without locks
      pass
    yield


def recognise_run(config: ConfigDict, workdir: str) -> dict[str, Any] | None:
  """Looks at what an earlier start left in the folder; returns the summary of a run that is finished.

  Raises:
    ValueError: a damaged run, or one whose config contradicts this one.
  """
  path, checkpoints = os.path.join(workdir, "config.json"), os.path.join(workdir, "checkpoints")
  if os.path.exists(checkpoints) and not os.path.isdir(checkpoints):
    raise ValueError(f"{checkpoints} is not a folder; choose another --workdir.")
  if not os.path.exists(path):
    return None
  refuse_other_config(config, read_json(path), f"the run in {workdir}")
  read_lines(os.path.join(workdir, "metrics.jsonl"))  # refuses damaged records before they are rewritten
  finished = os.path.join(workdir, "summary.json")
  if not os.path.exists(finished):
    return None
  summary = read_json(finished)
  if summary.get("rounds", 0) >= config.rounds:
    return summary
  if not os.path.isdir(checkpoints):
    raise ValueError(f"The run in {workdir} ended at round {summary.get('rounds')} and its checkpoints are gone, so it "
                     "cannot be continued; choose another --workdir.")
  return None


def read_json(path: str) -> dict[str, Any]:
  """The object in a JSON file of a run."""
  try:
    with open(path, encoding="utf-8") as f:
      content = json.load(f)
    if isinstance(content, dict) and content:
      return content
  except ValueError:
    pass
  raise ValueError(f"{path} is damaged; restore it, move it away or choose another --workdir.")


def write_config(config: ConfigDict, workdir: str) -> None:
  write_json(os.path.join(workdir, "config.json"), configs.flat(config))


def write_json(path: str, content: dict[str, Any]) -> None:
  """Writes a file that is either whole or not there."""
  with open(path + ".tmp", "w", encoding="utf-8") as f:
    json.dump(content, f, indent=2)
    f.write("\n")
  os.replace(path + ".tmp", path)


def summarise(config: ConfigDict, workdir: str, facts: dict[str, Any]) -> dict[str, Any]:
  """Writes summary.json and the plot from metrics.jsonl."""
  records = read_lines(os.path.join(workdir, "metrics.jsonl"))
  last = records[-1] if records else {}
  if last.get("round") != config.rounds or "eval_loss" not in last:
    raise ValueError(f"{workdir}/metrics.jsonl lacks the record of round {config.rounds}, so there is no summary; the final "
                     "state is in checkpoints/.")
  speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
  keys = ("eval_loss", "eval_perplexity", "eval_loss_workers", "train_loss", "tokens", "step", "bytes_overlapped",
          "bytes_blocking")
  summary = {"rounds": config.rounds, "method": config.method.name, "workers": config.workers,
             **{key: last[key] for key in keys}, **facts,
             "consensus_l2": last_value(records, "consensus_l2"), "js_distance": last_value(records, "js_distance"),
             "tokens_per_second": float(np.median(speeds)) if speeds else None,
             "jax": jax.__version__, "python": platform.python_version(), "platform": jax.devices()[0].platform}
  curves.plot_run(workdir, summary)
  write_json(os.path.join(workdir, "summary.json"), summary)
  return summary


def last_value(records: list[dict[str, Any]], key: str) -> Any:
  return next((r[key] for r in reversed(records) if key in r), None)


# --- metrics ---------------------------------------------------------------------------------------------------------


def flush(pending: dict[str, Any] | None, log: RunLog, config: ConfigDict) -> None:
  """Reads a round's metrics from the device (waiting for it) and writes its record."""
  if pending is None:
    return
  record, metrics = pending["record"], jax.device_get(pending["metrics"])
  loss_MxH = metrics.pop("loss")
  if not np.isfinite(loss_MxH).all():
    worker, h = np.argwhere(~np.isfinite(loss_MxH))[0]
    step = record["step"] - config.inner_steps + h + 1
    raise NonFiniteError(f"Worker {worker} has loss {loss_MxH[worker, h]} at step {step} (round {record['round']}). "
                         + ADVICE)
  record["train_loss"] = float(loss_MxH[np.arange(config.inner_steps) < np.asarray(pending["taken"])[:, None]].mean())
  if "consensus_inner" in metrics:
    record["consensus_l2"] = math.sqrt(metrics["consensus_inner"])
    record["consensus_blocks"] = {k: float(v) for k, v in metrics.pop("consensus_blocks").items()}
  record |= {key: float(value) for key, value in metrics.items()}
  if "eval_loss" in record:
    record["eval_perplexity"] = math.exp(min(record["eval_loss"], 700.0))
  record["tokens_per_second"] = log.speed(pending["tokens"])
  log.write(record)


def refuse_non_finite(finite_M: jax.Array, step: int) -> None:
  """Stops before a save when a worker's parameters or optimizer state hold a non-finite number."""
  bad = np.flatnonzero(~np.asarray(finite_M))
  if bad.size:
    raise NonFiniteError(f"Worker {bad[0]} has non-finite parameters or optimizer state after step {step}. "
                         + ADVICE)


def finite_by_worker(state: State) -> jax.Array:
  """bool [M]: whether all floating-point leaves of a worker are finite."""
  checks = [jnp.isfinite(x).reshape(x.shape[0], -1).all(axis=1) for x in jax.tree.leaves(state[:3])
            if jnp.issubdtype(x.dtype, jnp.inexact)]
  return jnp.stack(checks).all(axis=0)


def consensus_by_block(w: PyTree, z: PyTree) -> dict[str, Any]:
  """Consensus distances (squared) of w in total and by block, and of z in total."""
  blocks = measure.by_block(w, lambda path: path.split("/")[0], fgd.mixing.path_of)
  return {"consensus_inner": sum(blocks.values()), "consensus_blocks": blocks,
          "consensus_outer": measure.pairwise_squared_distance(z)}


def js_of(apply: Callable, tokens_BxL: jax.Array) -> Callable:
  """A measure: JS distances of the workers' predictions on fixed held-out tokens, at the end of the inner phase."""
  def js(w: PyTree, z: PyTree) -> dict[str, jax.Array]:
    return measure.pairwise_js(jax.vmap(lambda params: apply(params, tokens_BxL))(w))

  return js


def make_evaluation(loss: Callable, heldout_NxBxL: np.ndarray, workers: fgd.Workers) -> Callable:
  """evaluate(mean params, stacked params) -> eval_loss of the mean model and eval_loss_workers, the workers' mean loss.

  The fixed batches are spread over the device positions.
  """
  sharding = workers.replicated()
  if workers.mesh is not None and heldout_NxBxL.shape[1] % workers.placement.devices == 0:
    sharding = NamedSharding(workers.mesh, PartitionSpec(None, "worker"))
  batches = jax.device_put(heldout_NxBxL, sharding)
  mean_loss = lambda params, tokens: jnp.mean(jax.lax.map(lambda b: loss(params, {"tokens": b}, None), tokens))
  one = jax.jit(mean_loss)
  each = jax.jit(workers.spmd(lambda stack, tokens: workers.each(
      lambda params: mean_loss(params, tokens), stack, how="map"), stacks=1))

  def evaluate(mean: PyTree, stack: PyTree) -> dict[str, Any]:
    return {"eval_loss": one(mean, batches), "eval_loss_workers": jnp.mean(each(stack, batches))}

  return evaluate


# --- command ---------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}; all options start with --.")
  if not flags.FLAGS.workdir:
    raise app.UsageError("--workdir=DIR is needed: the folder for checkpoints, metrics and plots.")
  show_own_logs()
  try:
    train(flags.FLAGS.config, flags.FLAGS.workdir)
  except (ValueError, OSError, NonFiniteError) as e:
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    logging.error("%s", " ".join(str(e).split()))
    raise SystemExit(2) from e
  except KeyboardInterrupt as e:
    logging.error("Interrupted; the same command continues from the last checkpoint in %s.", flags.FLAGS.workdir)
    raise SystemExit(130) from e


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", help_string=(
      "Config file with optional settings, e.g. configs/quickstart.py:workers=8,method=LocalM1M2 (required). Every key of "
      "configs/default.py can also be set by --config.KEY=VALUE. Methods: " + ", ".join(
          [*fgd.methods.METHODS, *fgd.methods.PRESETS]) + "."))
  flags.DEFINE_string("workdir", None, "Folder of the run (required); the same command resumes it.")
  flags.mark_flag_as_required("config")
  app.run(main, flags_parser=functools.partial(
      configs.parse_flags,
      usage="python -m fgd_jax.train --config=FILE[:key=value,...] --workdir=DIR; keys: configs/default.py"))
