"""Independent float64 NumPy references of the methods, written from specs/methods-core.md and specs/ours.md alone.

Every generator takes `start` (dict name -> array, no worker axis), `batches` (one {"x": [M, H, ...], "y": [M, H, ...]} a
round), `m`, an inner optimizer with `.init(w)` and `.step(w, g, state)` on dicts of [M, ...], `grad(w, x, y)` -> (loss [M],
gradients), then the method's options. After each round it yields (z, loss, w): z the live parameters of all workers, loss
[M, H], w the parameters after the round's last inner step, before anything else that happens at that step. Streaming and
pipelined DiLoCo yield a fourth element, the outer parameters (no worker axis). Delta = start - end, to be subtracted.

A fragment is a list of (name, index): index None is the whole leaf, otherwise a slice or a tuple that indexes the leaf
without its worker axis.
"""

from collections import deque

import numpy as np

# --- shared ---------------------------------------------------------------------------------------------------------


def copy(tree):
  return {k: np.array(v, np.float64) for k, v in tree.items()}


def stack(tree, m):
  """The same parameters for M workers."""
  return {k: np.repeat(np.asarray(v, np.float64)[None], m, 0) for k, v in tree.items()}


def zeros(tree):
  return {k: np.zeros(np.shape(v)) for k, v in tree.items()}


def mix(matrix, tree):
  """(W x)_m = sum_j W[m, j] x_j on every leaf; `matrix` is an array or a function of the leaf's name."""
  return {k: np.tensordot(matrix(k) if callable(matrix) else matrix, v, axes=1) for k, v in tree.items()}


def nesterov(theta, g, buf, lr, mu):
  """Section 0.3, the PyTorch form on one array: buf' = mu buf + g, theta' = theta - lr (g + mu buf')."""
  buf = mu * buf + g
  return theta - lr * (g + mu * buf), buf


def phase(w, state, batch, inner, grad):
  """H inner steps of all workers: (w, state, loss [M, H])."""
  losses = []
  for h in range(batch["x"].shape[1]):
    loss, g = grad(w, batch["x"][:, h], batch["y"][:, h])
    w, state = inner.step(w, g, state)
    losses.append(loss)
  return w, state, np.stack(losses, 1)


# --- methods without fragments --------------------------------------------------------------------------------------


def diloco(start, batches, m, inner, grad, lr, mu):
  """DiLoCo, section 1.1 (2311.08105, algorithm 1): one Nesterov step with the mean outer gradient."""
  yield from isoloco(start, batches, m, inner, grad, lr, mu, flatten=lambda delta: delta)


def iso_c(delta):
  """Section 7.1 (2607.03011): mean(S) U V^T of a matrix, everything else as it is."""
  if delta.ndim != 2:
    return delta
  u, s, vt = np.linalg.svd(delta, full_matrices=False)
  return s.mean() * (u @ vt)


def isoloco(start, batches, m, inner, grad, lr, mu, flatten=iso_c):
  """IsoLoCo, section 7.1 (2607.03011): mean, then Iso-C leaf by leaf, then Nesterov."""
  theta, buf = copy(start), zeros(start)
  state = inner.init(stack(theta, m))
  for batch in batches:
    w, state, loss = phase(stack(theta, m), state, batch, inner, grad)
    for k in theta:
      theta[k], buf[k] = nesterov(theta[k], flatten((theta[k] - w[k]).mean(0)), buf[k], lr, mu)
    yield stack(theta, m), loss, w


def eager(start, batches, m, inner, grad, lr, mu, delay=1):
  """Eager updates, section 3.1 (2502.12996): theta_m and its momentum belong to the worker.

  Dtilde_m = (Delta_m of this round + sum over j != m of Delta_j of `delay` rounds ago) / M; missing ones are zero.
  """
  theta = stack(start, m)
  buf, state = zeros(theta), inner.init(theta)
  fifo = deque(zeros(theta) for _ in range(delay))
  for batch in batches:
    w, state, loss = phase(theta, state, batch, inner, grad)
    fresh = {k: theta[k] - w[k] for k in theta}
    fifo.append(fresh)
    old, new = fifo.popleft(), {}
    for k in theta:
      d = np.stack([(fresh[k][i] + sum(old[k][j] for j in range(m) if j != i)) / m for i in range(m)])
      new[k], buf[k] = nesterov(theta[k], d, buf[k], lr, mu)
    theta = new
    yield copy(theta), loss, w


def noloco(start, batches, m, inner, grad, matrices, alpha, beta, gamma):
  """NoLoCo, section 5.1 in the form of the authors' code (2506.10911); matrices(r) are the group means.

  delta' = alpha delta + beta mean_G(theta - phi) + gamma (mean_G phi - phi);  phi' = phi + delta'
  """
  phi = stack(start, m)
  delta, state = zeros(phi), inner.init(phi)
  for r, batch in enumerate(batches):
    theta, state, loss = phase(phi, state, batch, inner, grad)
    progress, group = mix(matrices(r), {k: theta[k] - phi[k] for k in phi}), mix(matrices(r), phi)
    delta = {k: alpha * delta[k] + beta * progress[k] + gamma * (group[k] - phi[k]) for k in phi}
    phi = {k: phi[k] + delta[k] for k in phi}
    yield copy(phi), loss, theta


def gasloc(start, batches, m, inner, grad, matrices, eta, alpha, gamma, mixed, steps=None):
  """GASLoC, section 6 (2606.11081); matrices(r) = I - alpha Lambda of the round, so `alpha` itself is not used again.

  y_t = theta_t + eta (w - theta_t), y_{-1} = theta_0.  local: theta' = (I - alpha Lambda) y_t + gamma (y_t - y_{t-1});
  mixed: theta' = (I - alpha Lambda)(y_t + gamma (y_t - y_{t-1})).
  With steps = [H_1..H_M] worker i takes the first H_i steps of each round and then stands still, optimizer state
  included; the losses of the steps left out are those of the parameters at rest.
  """
  theta = stack(start, m)
  before = copy(theta)
  own = lambda tree, i: {k: v[i:i + 1] for k, v in tree.items()}
  state = inner.init(theta) if steps is None else [inner.init(own(theta, i)) for i in range(m)]
  for r, batch in enumerate(batches):
    if steps is None:
      w, state, loss = phase(theta, state, batch, inner, grad)
    else:
      ends, losses = [], []
      for i, count in enumerate(steps):
        mine, end = own(batch, i), own(theta, i)
        first, rest = ({k: v[:, s] for k, v in mine.items()} for s in (slice(count), slice(count, None)))
        loss = [np.zeros((1, 0))]
        if count:
          end, state[i], taken = phase(end, state[i], first, inner, grad)
          loss.append(taken)
        loss += [grad(end, rest["x"][:, h], rest["y"][:, h])[0][:, None] for h in range(rest["x"].shape[1])]
        ends.append(end)
        losses.append(np.concatenate(loss, 1))
      w, loss = {k: np.concatenate([e[k] for e in ends]) for k in theta}, np.concatenate(losses)
    y = {k: theta[k] + eta * (w[k] - theta[k]) for k in theta}
    push = {k: gamma * (y[k] - before[k]) for k in theta}
    if mixed:
      theta = mix(matrices(r), {k: y[k] + push[k] for k in theta})
    else:
      gossip = mix(matrices(r), y)
      theta = {k: gossip[k] + push[k] for k in theta}
    before = y
    yield copy(theta), loss, w


def recovered(start, batches, m, inner, grad, lr, mu, retain):
  """GlobalM1 with recovered momentum and retained spread p = `retain`, ours.md section 2.

  x_r = mean z;  ybar_{-1} = z_0, ybar_{r-1} = (x_r + mu ybar_{r-2}) / (1 + mu) for r >= 1;
  y_m = x_r - lr Delta_m;  z_m' = y_m + mu (y_m - ybar_{r-1}) + p (z_m - x_r)
  """
  z, ybar = stack(start, m), copy(start)
  state = inner.init(z)
  for r, batch in enumerate(batches):
    x = {k: v.mean(0) for k, v in z.items()}
    if r:
      ybar = {k: (x[k] + mu * ybar[k]) / (1 + mu) for k in x}
    w, state, loss = phase(z, state, batch, inner, grad)
    new = {}
    for k in z:
      y = x[k] - lr * (z[k] - w[k])
      new[k] = y + mu * (y - ybar[k]) + retain * (z[k] - x[k])
    z = new
    yield copy(z), loss, w


# --- methods with fragments -----------------------------------------------------------------------------------------


def get(tree, piece, workers=False):
  """A copy of one (name, index) piece; workers: the leaf has a leading worker axis."""
  name, index = piece
  return np.array(tree[name][place(index, workers)])


def put(tree, piece, value, workers=False):
  name, index = piece
  tree[name][place(index, workers)] = value


def place(index, workers):
  index = () if index is None else index if isinstance(index, tuple) else (index,)
  return (slice(None), *index) if workers else (*index, ...)


def due(t, period, count, last):
  """Fragments due after inner step t (from 1): t = t_p mod H, t_p = p H / P, and H steps since the start or the last one."""
  out = [p for p in range(count) if (t - p * period // count) % period == 0 and t - last[p] >= period]
  for p in out:
    last[p] = t
  return out


def streaming(start, batches, m, inner, grad, fragments, delay, blend, lr, mu, compress=None):
  """Streaming DiLoCo, section 2.1 (2501.18512, algorithm 2); tau = `delay`, alpha = `blend` = weight of the local value.

  After inner step t, in this order: fragments launched tau steps ago land, then the one that is due is launched; tau = 0
  lands what has just been launched. What is launched at the end of a round with tau >= 1 lands in the next round.
  `compress` maps an array [M, ...] of outer gradients, worker by worker. Outer parameters: theta, each fragment as last
  synchronised.
  """
  theta, buf, w = copy(start), zeros(start), stack(start, m)
  state, last, flying, t = inner.init(w), [0] * len(fragments), {}, 0

  def land(p):
    for piece, delta in zip(fragments[p], flying.pop(p), strict=True):
      new, momentum = nesterov(get(theta, piece), delta.mean(0), get(buf, piece), lr, mu)
      put(theta, piece, new)
      put(buf, piece, momentum)
      put(w, piece, blend * get(w, piece, True) + (1 - blend) * new, True)

  for batch in batches:
    period, losses = batch["x"].shape[1], []
    assert period % len(fragments) == 0 and 0 <= delay <= period // len(fragments)
    for h in range(period):
      loss, g = grad(w, batch["x"][:, h], batch["y"][:, h])
      w, state = inner.step(w, g, state)
      w = copy(w)
      end, t = copy(w), t + 1
      losses.append(loss)
      for p in [p for p in flying if last[p] + delay == t]:
        land(p)
      for p in due(t, period, len(fragments), last):
        deltas = [get(theta, piece) - get(w, piece, True) for piece in fragments[p]]
        flying[p] = deltas if compress is None else [compress(delta) for delta in deltas]
        if delay == 0:
          land(p)
    yield copy(w), np.stack(losses, 1), end, copy(theta)


def pipelined(start, batches, m, inner, grad, fragments, landing, blend, guess, lr, mu, compress=None,
              flatten=lambda delta: delta):
  """Pipelined DiLoCo, ours.md section 1: Streaming's schedule with a flight of H/P steps, one fragment always in flight.

  Launch: Delta_m = theta_q - w_m travels. guess "continue": guess_m = w_m; "own": the worker jumps to its own outer step
  guess_m = y_m + mu (y_m - ybar), y_m = theta - lr Delta_m (its own, not compressed), ybar the last point of the fragment's
  chain in two-sequence form (section 0.3): ybar_{-1} = theta_0, ybar_r = theta_r - lr Deltabar_r.
  Landing: theta_q and its momentum step with Deltabar; "add": w_m += theta_q' - guess_m;
  "blend": w_m = blend w_m + (1 - blend) theta_q'. Landing comes before a launch at the same step. `flatten` maps the mean
  outer gradient of a whole leaf before the outer step (section 7.1).
  Outer parameters: theta with the fragment in flight completed, on a copy.
  """
  assert landing in ("add", "blend") and guess in ("continue", "own")
  theta, buf, ybar, w = copy(start), zeros(start), copy(start), stack(start, m)
  state, last, flying, t = inner.init(w), [0] * len(fragments), {}, 0

  for batch in batches:
    period, losses = batch["x"].shape[1], []
    assert period % len(fragments) == 0
    for h in range(period):
      loss, g = grad(w, batch["x"][:, h], batch["y"][:, h])
      w, state = inner.step(w, g, state)
      w = copy(w)
      end, t = copy(w), t + 1
      losses.append(loss)
      for p in [p for p in flying if last[p] + period // len(fragments) == t]:
        for piece, (sent, guessed) in zip(fragments[p], flying.pop(p), strict=True):
          old, live = get(theta, piece), get(w, piece, True)
          mean = flatten(sent.mean(0))
          new, momentum = nesterov(old, mean, get(buf, piece), lr, mu)
          put(ybar, piece, old - lr * mean)
          put(theta, piece, new)
          put(buf, piece, momentum)
          put(w, piece, live + (new - guessed) if landing == "add" else blend * live + (1 - blend) * new, True)
      for p in due(t, period, len(fragments), last):
        flying[p] = []
        for piece in fragments[p]:
          anchor, guessed = get(theta, piece), get(w, piece, True)
          delta = anchor - guessed
          if guess == "own":
            y = anchor - lr * np.stack([flatten(d) for d in delta])
            guessed = y + mu * (y - get(ybar, piece))
            put(w, piece, guessed, True)
          flying[p].append((delta if compress is None else compress(delta), guessed))
    outer = copy(theta)
    for p, parts in flying.items():
      for piece, (sent, _) in zip(fragments[p], parts, strict=True):
        put(outer, piece, nesterov(get(theta, piece), flatten(sent.mean(0)), get(buf, piece), lr, mu)[0])
    yield copy(w), np.stack(losses, 1), end, outer


# --- histories by hand ----------------------------------------------------------------------------------------------

# Two workers, two fragments of one scalar each ("a" is fragment 0, "b" fragment 1), constant gradients, H = 6, inner SGD
# with lr 0.1, outer SGD with lr 1 and no momentum. Per step worker m moves by -d_m: a by 0.1, 0.3 (mean d = 0.2), b by
# -0.3, 0.1 (mean d = -0.1). Outer SGD with lr 1 makes theta the workers' mean at launch. A landing with beta = blend, tau
# steps after the launch: the mean loses (1 - beta) tau steps and the deviation e at launch becomes beta (e - tau (d_m - d)).
# With mean = start - T d and deviation = -E (d_m - d), deviations of a are (+0.1, -0.1) E and of b (+0.2, -0.2) E:
#   a is launched at 6, 12, 18.     tau = 0: T = 6, 12, 18 (theta too); E = 6 beta (1, 1 + beta, 1 + beta + beta^2).
#     tau >= 1: T = 6, 12 - (1 - beta) tau, 18 - 2 (1 - beta) tau; theta has T = 0, 6, 12 - (1 - beta) tau;
#               E = 6, beta (6 + tau) + 6 - tau, beta (beta (6 + tau) + 6) + 6 - tau.
#   b is launched at 9, 15 (H steps after the start are needed, so not at 3) and lands inside the round, for tau = 3 on its
#     last step: T as in a with tau >= 1; theta has T = 0, 9, 15 - (1 - beta) tau;
#               E = 6, beta (9 + tau) + 3 - tau, beta (beta (9 + tau) + 6) + 3 - tau.
HISTORY_STEPS, HISTORY_INNER_LR = 6, 0.1
HISTORY_START = {"a": 2.0, "b": -1.0}
HISTORY_GRADIENTS = {"a": (1.0, 3.0), "b": (-3.0, 1.0)}  # by worker
HISTORY_FRAGMENTS = [[("a", None)], [("b", None)]]
# (delay, blend) -> after rounds 1, 2, 3: (a of workers 0 and 1, theta of a, b of workers 0 and 1, theta of b)
ONE = ((1.4, 0.2), 2.0, (0.8, -1.6), -1.0)  # round 1 with tau >= 1: six steps, nothing has landed
HISTORIES = {
  (0, 0.0): [((0.8, 0.8), 0.8, (0.8, -1.6), -1.0), ((-0.4, -0.4), -0.4, (0.8, -0.4), -0.1),
             ((-1.6, -1.6), -1.6, (1.4, 0.2), 0.5)],
  (1, 0.0): [ONE, ((0.3, -0.7), 0.8, (0.5, -0.3), -0.1), ((-0.7, -1.7), -0.2, (1.0, 0.2), 0.4)],
  (2, 0.0): [ONE, ((0.4, -0.4), 0.8, (0.2, -0.2), -0.1), ((-0.4, -1.2), 0.0, (0.6, 0.2), 0.3)],
  (3, 0.0): [ONE, ((0.5, -0.1), 0.8, (-0.1, -0.1), -0.1), ((-0.1, -0.7), 0.2, (0.2, 0.2), 0.2)],
  (0, 0.5): [((1.1, 0.5), 0.8, (0.8, -1.6), -1.0), ((0.05, -0.85), -0.4, (1.7, -1.3), -0.1),
             ((-1.075, -2.125), -1.6, (2.45, -0.85), 0.5)],
  (1, 0.5): [ONE, ((0.55, -1.15), 0.8, (1.55, -1.25), -0.1), ((-0.425, -2.375), -0.3, (2.2, -0.8), 0.45)],
  (2, 0.5): [ONE, ((0.6, -1.0), 0.8, (1.4, -1.2), -0.1), ((-0.3, -2.1), -0.2, (1.95, -0.75), 0.4)],
  (3, 0.5): [ONE, ((0.65, -0.85), 0.8, (1.25, -1.15), -0.1), ((-0.175, -1.825), -0.1, (1.7, -0.7), 0.35)],
  # blend 1: nobody ever adopts anything; only theta knows of the launches.
  (0, 1.0): [((1.4, 0.2), 0.8, (0.8, -1.6), -1.0), ((0.8, -1.6), -0.4, (2.6, -2.2), -0.1),
             ((0.2, -3.4), -1.6, (4.4, -2.8), 0.5)],
  (1, 1.0): [ONE, ((0.8, -1.6), 0.8, (2.6, -2.2), -0.1), ((0.2, -3.4), -0.4, (4.4, -2.8), 0.5)],
  (2, 1.0): [ONE, ((0.8, -1.6), 0.8, (2.6, -2.2), -0.1), ((0.2, -3.4), -0.4, (4.4, -2.8), 0.5)],
  (3, 1.0): [ONE, ((0.8, -1.6), 0.8, (2.6, -2.2), -0.1), ((0.2, -3.4), -0.4, (4.4, -2.8), 0.5)],
}
# The same run of pipelined DiLoCo with the additive landing (3 steps in flight, none lost): a landing puts worker m at
# theta' - 3 d_m. "own" equals "continue" here: with lr 1 and no momentum the worker's own outer step is where it stands.
# The outer parameters have the launch of a at 6, 12, 18 completed.
PIPELINED_HISTORY = [((1.4, 0.2), 0.8, (0.8, -1.6), -1.0), ((0.2, -1.0), -0.4, (0.8, -0.4), -0.1),
                     ((-1.0, -2.2), -1.6, (1.4, 0.2), 0.5)]


def layered_data_parallel(layers, step_seconds, bits, bandwidth):
  """Utilisation of data parallelism by layers: the link is busy from the first, the second-last or the last gradient on.

      T' = max(T + c, T - u + 2 c, (L+2) u + L c),   u = T / (3L-1),  c = bits / (L B)
  """
  unit, per = step_seconds / (3 * layers - 1), bits / layers / bandwidth
  if layers == 1:
    return step_seconds / (step_seconds + per)
  return step_seconds / max(step_seconds + per, step_seconds - unit + 2 * per, (layers + 2) * unit + layers * per)
