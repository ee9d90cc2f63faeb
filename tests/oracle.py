"""The judge: Variational Linear Attention in float64 NumPy, token by token, direct inverse.

Nothing here imports the library or JAX. The forward functions are the printed recurrence and are
analytic (no ``conj``, no ``abs`` of a value), so they also take complex128 inputs: complex-step
differentiation of them is exact to rounding, and that is how `test_oracle.py` checks the adjoints,
which are written by hand as one reverse sweep over the tokens. Batch and heads are vectorised, time
is a Python loop.

Layouts are the public ones: query [B,T,Hq,D]; key, direction, rhs, write_key [B,T,H,D];
value [B,T,H,E]; memory [B,H,D,E]; penalty [B,H,D,D]; key_sum [B,H,D]; segment_ids, mask [B,T];
lambda0 a scalar or [H]; the gates beta, weight and log_decay [B,T,H] or None. Query head h reads
key/value head h // (Hq // H).

With log_decay the state is multiplied by exp(log_decay) before the token is added; lambda0 stays.
"""

import numpy as np


def _wide(*arrays):
    """Each array as float64, or complex128 if it is complex; None stays None."""
    wide = []
    for x in arrays:
        if x is not None:
            x = np.asarray(x)
            x = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
        wide.append(x)
    return wide


def _zeros(shape, *like):
    return np.zeros(shape, np.result_type(np.float64, *(x.dtype for x in like if x is not None)))


def _regularizer(lambda0, heads, dim):
    """lambda0 * I for every head, [H,D,D]."""
    (lambda0,) = _wide(lambda0)
    return np.broadcast_to(lambda0, (heads,))[:, None, None] * np.eye(dim)


def _symmetric(x):
    return (x + np.swapaxes(x, -1, -2)) / 2


def _restarts(segment_ids, batch, length, mask=None):
    """[T,B]: whether the state restarts just before the token.

    It does at a token whose segment is not that of the one before it. The first token never
    restarts; a masked token is none, and only those that are present are compared.
    """
    starts = np.zeros((length, batch), bool)
    for b in range(batch if segment_ids is not None else 0):
        before = None
        for t in range(length):
            if mask is None or np.asarray(mask)[b, t]:
                starts[t, b] = before is not None and segment_ids[b, t] != before
                before = segment_ids[b, t]
    return starts


def _cleared(x, restart):
    """``x`` with the rows of the batch that restart set to zero."""
    return np.where(restart.reshape(-1, *[1] * (x.ndim - 1)), 0, x)


def _masked(x, mask):
    return x if mask is None or x is None else np.where(np.asarray(mask)[:, :, None, None], x, 0)


def _gate(x, mask, absent, like):
    """A gate [B,T,H]: ``absent`` (also the value of None) where the token is masked."""
    x = np.full(like.shape[:3], float(absent)) if x is None else x
    return x if mask is None else np.where(np.asarray(mask)[:, :, None], x, absent)


def _gates(beta, log_decay, mask, like):
    """Both gates of the recurrence: a masked token has weight 0 and decay 1."""
    beta, log_decay = _wide(beta, log_decay)
    return _gate(_gate(beta, None, 1, like), mask, 0, like), _gate(log_decay, mask, 0, like)


def _times(gate, x):
    """A gate [B,H] times ``x`` [B,H,...]."""
    return gate.reshape(*gate.shape, *[1] * (x.ndim - 2)) * x


def _sum_per_head(x):
    """[B,H,...] to [B,H]."""
    return x.reshape(*x.shape[:2], -1).sum(-1)


def _outer(x, y):
    return x[..., :, None] * y[..., None, :]


def _apply(matrix, vector):
    return (matrix @ vector[..., None])[..., 0]


def _transpose_apply(matrix, vector):
    return _apply(np.swapaxes(matrix, -1, -2), vector)


def _groups(x, heads):
    """[B,T,Hq,...] as [B,T,H,G,...]."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads, *x.shape[3:])


def normalize(x):
    """(x / |x|, 1 / |x|); both zero, and locally constant, where (the real part of) x is zero."""
    peak = np.abs(np.real(x)).max(-1, keepdims=True)  # only a scale, it cancels
    safe = np.where(peak > 0, peak, 1)
    scaled = np.where(peak > 0, x / safe, 1)
    inverse = np.where(peak > 0, 1 / np.sqrt((scaled * scaled).sum(-1, keepdims=True)) / safe, 0)
    return x * inverse, inverse


def _write_vector(alpha, unit_key, write_gain):
    if write_gain == "unit":
        return normalize(alpha)[0]
    if write_gain == "projection":
        dot = (alpha * unit_key).sum(-1, keepdims=True)
        return np.where(dot == 0, 0, alpha / np.where(dot == 0, 1, dot))
    if write_gain == "rls":
        return alpha
    raise ValueError(write_gain)


def attention(
    query,
    key,
    value,
    direction=None,
    *,
    beta=None,
    log_decay=None,
    inverse="write",
    lambda0=None,
    initial_state=None,
    segment_ids=None,
    mask=None,
    write_gain="unit",
    readout="ratio",
    eps=1e-6,
):
    """The recurrence as printed: (out, (memory, penalty, key_sum), write vectors [B,T,H,D]).

    With ``inverse="read"`` the write vector is the weighted unit key, and the read-out is at the
    solution for the query, without a ratio.
    """
    read, lambda0 = _kind(inverse, lambda0)
    query, key, value, direction = (_masked(x, mask) for x in _wide(query, key, value, direction))
    beta, log_decay = _gates(beta, log_decay, mask, key)
    batch, length, heads, dim = key.shape
    query = _groups(query, heads)
    memory, penalty, key_sum = _wide(*(initial_state or (None, None, None)))
    like = (query, key, value, direction, memory, penalty, key_sum, np.asarray(lambda0), beta)
    like = (*like, log_decay)
    ridge = _regularizer(lambda0, heads, dim)
    memory = _zeros((batch, heads, dim, value.shape[-1]), *like) if memory is None else memory
    penalty = _zeros((batch, heads, dim, dim), *like) if penalty is None else _symmetric(penalty)
    key_sum = _zeros((batch, heads, dim), *like) if key_sum is None else key_sum
    out = _zeros((*query.shape[:4], value.shape[-1]), *like)
    writes = _zeros(key.shape, *like)
    for t, restart in enumerate(_restarts(segment_ids, batch, length, mask)):
        decay, weight = np.exp(log_decay[:, t]), beta[:, t]
        memory, penalty, key_sum = (
            _times(decay, _cleared(x, restart)) for x in (memory, penalty, key_sum)
        )
        q, k, v = query[:, t], key[:, t], value[:, t]
        unit_key, _ = normalize(k)
        u = _direction(direction, unit_key, read, t)
        penalty = penalty + _times(weight, _outer(u, u))
        matrix_inverse = np.linalg.inv(ridge + penalty)
        key_sum = key_sum + _times(weight, k)
        if read:
            a = writes[:, t] = _times(weight, unit_key)
            memory = memory + _outer(a, v)
            out[:, t] = q @ matrix_inverse @ memory
            continue
        alpha = _apply(matrix_inverse, unit_key)
        a = writes[:, t] = _times(weight, _write_vector(alpha, unit_key, write_gain))
        memory = memory + _outer(a, v - _transpose_apply(memory, unit_key))
        out[:, t] = q @ memory
        if readout == "ratio":
            total = (q @ key_sum[..., None])[..., 0]
            out[:, t] /= np.where(total.real > eps, total, eps)[..., None]
    return out.reshape(batch, length, -1, value.shape[-1]), (memory, penalty, key_sum), writes


def _kind(inverse, lambda0):
    """Whether the inverse is applied at the read, and lambda0 with its default."""
    if inverse not in ("write", "read"):
        raise ValueError(inverse)
    read = inverse == "read"
    return read, ((1.0 if read else 0.1) if lambda0 is None else lambda0)


def _direction(direction, unit_key, read, t=slice(None)):
    if direction is not None:
        return direction[:, t]
    return unit_key if read else unit_key / np.sqrt(unit_key.shape[-1])


def penalty_solve(
    rhs,
    direction,
    *,
    lambda0,
    weight=None,
    log_decay=None,
    initial_penalty=None,
    segment_ids=None,
):
    """((lambda0 I + P_t)^-1 rhs_t with P_t = exp(log_decay_t) P_{t-1} + weight_t u u^T, last P).

    rhs [B,T,Hq,D] with Hq a multiple of H.
    """
    solution, penalties = _solve_trace(
        rhs, direction, lambda0, weight, log_decay, initial_penalty, segment_ids
    )
    return solution, penalties[-1]


def _solve_trace(rhs, direction, lambda0, weight, log_decay, initial_penalty, segment_ids):
    """The solution, and the penalty before the first token and after each."""
    rhs, direction, penalty = _wide(rhs, direction, initial_penalty)
    weight, log_decay = _wide(weight, log_decay)
    batch, length, heads, dim = direction.shape
    like = (rhs, direction, penalty, np.asarray(lambda0), weight, log_decay)
    weight, log_decay = _gate(weight, None, 1, direction), _gate(log_decay, None, 0, direction)
    penalty = _zeros((batch, heads, dim, dim), *like) if penalty is None else _symmetric(penalty)
    ridge = _regularizer(lambda0, heads, dim)
    shape, rhs = rhs.shape, _groups(rhs, heads)
    solution = _zeros(rhs.shape, *like)
    penalties = [penalty]
    for t, restart in enumerate(_restarts(segment_ids, batch, length)):
        u = direction[:, t]
        penalty = _times(np.exp(log_decay[:, t]), _cleared(penalty, restart))
        penalty = penalty + _times(weight[:, t], _outer(u, u))
        penalties.append(penalty)
        solution[:, t] = rhs[:, t] @ np.linalg.inv(ridge + penalty)  # symmetric
    return solution.reshape(shape), penalties


def delta_rule(
    query, key, write_key, value, *, log_decay=None, initial_memory=None, segment_ids=None
):
    """(out, the last memory) of S_t = g S_{t-1} + a_t (v_t - g S_{t-1}^T k_t)^T, o_t = S_t^T q_t.

    g = exp(log_decay_t), 1 for None.
    """
    out, memories = _delta_rule_trace(
        query, key, write_key, value, log_decay, initial_memory, segment_ids
    )
    return out, memories[-1]


def _delta_rule_trace(query, key, write_key, value, log_decay, initial_memory, segment_ids):
    query, key, write_key, value, memory = _wide(query, key, write_key, value, initial_memory)
    (log_decay,) = _wide(log_decay)
    batch, length, heads, dim = key.shape
    query = _groups(query, heads)
    like = (query, key, write_key, value, memory, log_decay)
    log_decay = _gate(log_decay, None, 0, key)
    memory = _zeros((batch, heads, dim, value.shape[-1]), *like) if memory is None else memory
    out = _zeros((*query.shape[:4], value.shape[-1]), *like)
    memories = [memory]
    for t, restart in enumerate(_restarts(segment_ids, batch, length)):
        memory = _times(np.exp(log_decay[:, t]), _cleared(memory, restart))
        residual = value[:, t] - _transpose_apply(memory, key[:, t])
        memory = memory + _outer(write_key[:, t], residual)
        out[:, t] = query[:, t] @ memory
        memories.append(memory)
    return out.reshape(batch, length, -1, value.shape[-1]), memories


def key_sums(key, *, weight=None, log_decay=None, initial=None, segment_ids=None):
    """z_t = exp(log_decay_t) z_{t-1} + weight_t k_t, [B,T,H,D], and z before the first token."""
    key, weight, log_decay, total = _wide(key, weight, log_decay, initial)
    batch, length, heads, dim = key.shape
    like = (key, weight, log_decay, total)
    weight, log_decay = _gate(weight, None, 1, key), _gate(log_decay, None, 0, key)
    total = _zeros((batch, heads, dim), *like) if total is None else total
    initial, sums = total, _zeros(key.shape, *like)
    for t, restart in enumerate(_restarts(segment_ids, batch, length)):
        total = _times(np.exp(log_decay[:, t]), _cleared(total, restart))
        total = sums[:, t] = total + _times(weight[:, t], key[:, t])
    return sums, initial


# What others print, as loops over their equations: for agreement where the definitions meet.


def mesa_net(query, key, value, beta, log_decay, ridge):
    """MesaNet, solved exactly: q^T (H_kk + diag(ridge))^-1 H_kv, one query head a key head.

    H_kk = g H_kk + beta k k^T, H_kv = g H_kv + beta k v^T; ridge [H,D]. Returns out [B,T,H,E].
    """
    batch, length, heads, dim = key.shape
    kk, kv = np.zeros((batch, heads, dim, dim)), np.zeros((batch, heads, dim, value.shape[-1]))
    out = np.zeros((batch, length, heads, value.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                k, decay = key[b, t, h], np.exp(log_decay[b, t, h])
                kk[b, h] = decay * kk[b, h] + beta[b, t, h] * np.outer(k, k)
                kv[b, h] = decay * kv[b, h] + beta[b, t, h] * np.outer(k, value[b, t, h])
                solution = np.linalg.solve(kk[b, h] + np.diag(ridge[h]), query[b, t, h])
                out[b, t, h] = solution @ kv[b, h]
    return out


def gated_delta_net(query, key, value, beta, log_decay):
    """Gated DeltaNet: decay, correct on what has decayed, write; one query head a key head."""
    batch, length, heads, dim = key.shape
    memory = np.zeros((batch, heads, dim, value.shape[-1]))
    out = np.zeros((batch, length, heads, value.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                k, state = key[b, t, h], memory[b, h]
                state *= np.exp(log_decay[b, t, h])
                state += np.outer(k, beta[b, t, h] * (value[b, t, h] - k @ state))
                out[b, t, h] = query[b, t, h] @ state
    return out


# Adjoints: real inputs, one reverse sweep. A cotangent may be None (zero).


def _per_lambda0(gradient, lambda0):
    """The gradient [H] in the shape of ``lambda0``."""
    return gradient if np.ndim(lambda0) else gradient.sum()


def penalty_solve_grad(
    cotangent_solution,
    cotangent_penalty,
    rhs,
    direction,
    *,
    lambda0,
    weight=None,
    log_decay=None,
    initial_penalty=None,
    segment_ids=None,
):
    """Gradients for rhs, direction, lambda0, penalty (the initial one), weight and log_decay."""
    solution, penalties = _solve_trace(
        rhs, direction, lambda0, weight, log_decay, initial_penalty, segment_ids
    )
    rhs, direction, weight, log_decay = _wide(rhs, direction, weight, log_decay)
    weight, log_decay = _gate(weight, None, 1, direction), _gate(log_decay, None, 0, direction)
    cotangent_solution, d_penalty = _wide(cotangent_solution, cotangent_penalty)
    batch, length, heads, dim = direction.shape
    d_penalty = np.zeros_like(penalties[0]) if d_penalty is None else d_penalty
    if cotangent_solution is None:
        cotangent_solution = np.zeros_like(rhs)
    alphas, cotangents = _groups(solution, heads), _groups(cotangent_solution, heads)
    ridge = _regularizer(lambda0, heads, dim)
    restarts = _restarts(segment_ids, batch, length)
    d_rhs, d_direction, d_lambda0 = np.zeros_like(alphas), np.zeros_like(direction), np.zeros(heads)
    d_weight, d_log_decay = np.zeros_like(weight), np.zeros_like(weight)
    for t in reversed(range(length)):
        u, alpha = direction[:, t], alphas[:, t]
        beta = d_rhs[:, t] = cotangents[:, t] @ np.linalg.inv(ridge + penalties[t + 1])
        d_penalty = d_penalty - np.swapaxes(beta, -1, -2) @ alpha
        d_lambda0 -= (beta * alpha).sum((0, 2, 3))
        pulled = _apply(_symmetric(d_penalty), u)
        d_direction[:, t] = 2 * _times(weight[:, t], pulled)
        d_weight[:, t] = (u * pulled).sum(-1)
        decayed = _times(np.exp(log_decay[:, t]), _cleared(penalties[t], restarts[t]))
        d_log_decay[:, t] = _sum_per_head(d_penalty * decayed)
        d_penalty = _cleared(_times(np.exp(log_decay[:, t]), d_penalty), restarts[t])
    return {
        "rhs": d_rhs.reshape(rhs.shape),
        "direction": d_direction,
        "lambda0": _per_lambda0(d_lambda0, lambda0),
        "penalty": _symmetric(d_penalty),
        "weight": d_weight,
        "log_decay": d_log_decay,
    }


def delta_rule_grad(
    cotangent_out,
    cotangent_memory,
    query,
    key,
    write_key,
    value,
    *,
    log_decay=None,
    initial_memory=None,
    segment_ids=None,
):
    """Gradients for query, key, write_key, value, memory (the initial one) and log_decay."""
    _, memories = _delta_rule_trace(
        query, key, write_key, value, log_decay, initial_memory, segment_ids
    )
    query, key, write_key, value, log_decay = _wide(query, key, write_key, value, log_decay)
    log_decay = _gate(log_decay, None, 0, key)
    cotangent_out, d_memory = _wide(cotangent_out, cotangent_memory)
    batch, length, heads, _ = key.shape
    shape, query = query.shape, _groups(query, heads)
    if cotangent_out is None:
        cotangent_out = np.zeros((*shape[:3], value.shape[-1]))
    cotangent_out = _groups(cotangent_out, heads)
    d_memory = np.zeros_like(memories[0]) if d_memory is None else d_memory
    d_query, d_key, d_write_key, d_value, d_log_decay = (
        np.zeros_like(x) for x in (query, key, write_key, value, log_decay)
    )
    restarts = _restarts(segment_ids, batch, length)
    for t in reversed(range(length)):
        decay = np.exp(log_decay[:, t])
        before = _times(decay, _cleared(memories[t], restarts[t]))
        residual = value[:, t] - _transpose_apply(before, key[:, t])
        d_query[:, t] = cotangent_out[:, t] @ np.swapaxes(memories[t + 1], -1, -2)
        d_memory = d_memory + np.swapaxes(query[:, t], -1, -2) @ cotangent_out[:, t]
        d_write_key[:, t] = _apply(d_memory, residual)
        d_residual = d_value[:, t] = _transpose_apply(d_memory, write_key[:, t])
        d_key[:, t] = -_apply(before, d_residual)
        d_memory = d_memory - _outer(key[:, t], d_residual)
        d_log_decay[:, t] = _sum_per_head(d_memory * before)
        d_memory = _cleared(_times(decay, d_memory), restarts[t])
    return {
        "query": d_query.reshape(shape),
        "key": d_key,
        "write_key": d_write_key,
        "value": d_value,
        "memory": d_memory,
        "log_decay": d_log_decay,
    }


def key_sums_grad(cotangent, key, *, weight, log_decay, initial=None, segment_ids=None):
    """Gradients for key, weight, log_decay and key_sum (the initial one); [B,T,H,D] cotangents."""
    sums, initial = key_sums(
        key, weight=weight, log_decay=log_decay, initial=initial, segment_ids=segment_ids
    )
    batch, length = key.shape[:2]
    restarts = _restarts(segment_ids, batch, length)
    d_key, d_weight, d_log_decay = (np.zeros_like(x) for x in (key, weight, log_decay))
    d_sum = np.zeros_like(initial)
    for t in reversed(range(length)):
        decay = np.exp(log_decay[:, t])
        d_sum = d_sum + cotangent[:, t]
        d_key[:, t] = _times(weight[:, t], d_sum)
        d_weight[:, t] = (d_sum * key[:, t]).sum(-1)
        before = _cleared(sums[:, t - 1] if t else initial, restarts[t])
        d_log_decay[:, t] = decay * (d_sum * before).sum(-1)
        d_sum = _cleared(_times(decay, d_sum), restarts[t])
    return {"key": d_key, "weight": d_weight, "log_decay": d_log_decay, "key_sum": d_sum}


def _normalize_grad(cotangent, x):
    unit, inverse = normalize(x)
    return (cotangent - (cotangent * unit).sum(-1, keepdims=True) * unit) * inverse


def _write_vector_grad(cotangent, alpha, unit_key, write_gain):
    """(d_alpha, d_unit_key)."""
    if write_gain == "unit":
        return _normalize_grad(cotangent, alpha), np.zeros_like(unit_key)
    if write_gain == "projection":
        dot = (alpha * unit_key).sum(-1, keepdims=True)
        inverse = np.where(dot == 0, 0, 1 / np.where(dot == 0, 1, dot))
        d_dot = -(cotangent * alpha).sum(-1, keepdims=True) * inverse**2
        return cotangent * inverse + d_dot * unit_key, d_dot * alpha
    return cotangent, np.zeros_like(unit_key)


def _ratio_grad(cotangent, numerator, query, sums, eps):
    """Adjoint of numerator / max(sums . query, eps), all [B,T,H,G,.] but the sums.

    Returns (d_numerator, d_query, d_sums).
    """
    total = np.einsum("bthgd,bthd->bthg", query, sums)
    floor = np.maximum(total, eps)
    d_total = np.where(total > eps, -(cotangent * numerator).sum(-1) / floor**2, 0)[..., None]
    d_query = d_total * sums[:, :, :, None]
    return cotangent / floor[..., None], d_query, (d_total * query).sum(3)


def attention_grad(
    cotangent_out,
    cotangent_state,
    query,
    key,
    value,
    direction=None,
    *,
    beta=None,
    log_decay=None,
    inverse="write",
    lambda0=None,
    initial_state=None,
    segment_ids=None,
    mask=None,
    write_gain="unit",
    readout="ratio",
    eps=1e-6,
):
    """Gradients of <cotangent_out, out> + <cotangent_state, state>.

    ``cotangent_state`` is None or (memory, penalty, key_sum), each of them possibly None.
    Keys of the result: query, key, value, direction, beta, log_decay (these three None if they
    were), lambda0, memory, penalty, key_sum (the last three of the initial state).
    """
    read, lambda0 = _kind(inverse, lambda0)
    given = {"direction": direction, "beta": beta, "log_decay": log_decay}
    query, key, value, direction = (_masked(x, mask) for x in _wide(query, key, value, direction))
    beta, log_decay = _gates(beta, log_decay, mask, key)
    heads = key.shape[2]
    memory, penalty, key_sum = _wide(*(initial_state or (None, None, None)))
    d_memory, d_penalty, d_key_sum = _wide(*(cotangent_state or (None, None, None)))
    (cotangent,) = _wide(cotangent_out)
    if cotangent is None:
        cotangent = np.zeros((*query.shape[:3], value.shape[-1]))

    unit_key, _ = normalize(key)
    u = _direction(direction, unit_key, read)
    segments = np.cumsum(_restarts(segment_ids, *key.shape[:2], mask), axis=0).T
    shared = {"log_decay": log_decay, "segment_ids": segments}
    solve = {"lambda0": lambda0, "weight": beta, "initial_penalty": penalty, **shared}
    rule = {"initial_memory": memory, **shared}
    adding = {"weight": beta, "initial": key_sum, **shared}
    sums, _ = key_sums(key, **adding)
    d_sums = np.zeros_like(sums)
    if d_key_sum is not None:
        d_sums[:, -1] = d_key_sum

    if read:
        a = beta[..., None] * unit_key
        x, _ = penalty_solve(query, u, **solve)
        rule_grad = delta_rule_grad(cotangent, d_memory, x, np.zeros_like(a), a, value, **rule)
        solve_grad = penalty_solve_grad(rule_grad["query"], d_penalty, query, u, **solve)
        d_query = solve_grad["rhs"]
        d_unit_key = beta[..., None] * rule_grad["write_key"]
        d_beta = (rule_grad["write_key"] * unit_key).sum(-1)
    else:
        alpha, _ = penalty_solve(unit_key, u, **solve)
        gained = _write_vector(alpha, unit_key, write_gain)
        a = beta[..., None] * gained
        numerator, _ = delta_rule(query, unit_key, a, value, **rule)
        d_numerator, d_query = cotangent, np.zeros_like(query)
        if readout == "ratio":
            d_numerator, d_query, d_total = _ratio_grad(
                *(_groups(x, heads) for x in (cotangent, numerator, query)), sums, eps
            )
            d_numerator, d_query = (
                x.reshape(y.shape) for x, y in ((d_numerator, cotangent), (d_query, query))
            )
            d_sums = d_sums + d_total
        rule_grad = delta_rule_grad(d_numerator, d_memory, query, unit_key, a, value, **rule)
        d_query = d_query + rule_grad["query"]
        d_beta = (rule_grad["write_key"] * gained).sum(-1)
        d_alpha, d_unit_key = _write_vector_grad(
            beta[..., None] * rule_grad["write_key"], alpha, unit_key, write_gain
        )
        solve_grad = penalty_solve_grad(d_alpha, d_penalty, unit_key, u, **solve)
        d_unit_key = d_unit_key + rule_grad["key"] + solve_grad["rhs"]
    sum_grad = key_sums_grad(d_sums, key, **adding)
    if direction is None:
        d_unit_key = d_unit_key + _direction(None, solve_grad["direction"], read)
    d_beta = d_beta + solve_grad["weight"] + sum_grad["weight"]
    d_log_decay = sum(x["log_decay"] for x in (rule_grad, solve_grad, sum_grad))
    gradients = {
        "query": _masked(d_query, mask),
        "key": _masked(sum_grad["key"] + _normalize_grad(d_unit_key, key), mask),
        "value": _masked(rule_grad["value"], mask),
        "direction": _masked(solve_grad["direction"], mask),
        "beta": d_beta if mask is None else np.where(np.asarray(mask)[..., None], d_beta, 0),
        "log_decay": _gate(d_log_decay, mask, 0, key),
        "lambda0": solve_grad["lambda0"],
        "memory": rule_grad["memory"],
        "penalty": solve_grad["penalty"],
        "key_sum": sum_grad["key_sum"],
    }
    return {n: None if given.get(n, x) is None else x for n, x in gradients.items()}
