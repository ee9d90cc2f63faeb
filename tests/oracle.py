"""The judge: Variational Linear Attention in float64 NumPy, token by token, direct inverse.

Nothing here imports the library or JAX. The forward functions are the printed recurrence and are
analytic (no ``conj``, no ``abs`` of a value), so they also take complex128 inputs: complex-step
differentiation of them is exact to rounding, and that is how `test_oracle.py` checks the adjoints,
which are written by hand as one reverse sweep over the tokens. Batch and heads are vectorised, time
is a Python loop.

Layouts are the public ones: query [B,T,Hq,D]; key, direction, rhs, write_key [B,T,H,D];
value [B,T,H,E]; memory [B,H,D,E]; penalty [B,H,D,D]; key_sum [B,H,D]; segment_ids, mask [B,T];
lambda0 a scalar or [H]. Query head h reads key/value head h // (Hq // H).
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


def _restarts(segment_ids, batch, length):
    """[T,B]: whether the state restarts just before the token. The first token never restarts."""
    starts = np.zeros((length, batch), bool)
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        starts[1:] = (ids[:, 1:] != ids[:, :-1]).T
    return starts


def _cleared(x, restart):
    """``x`` with the rows of the batch that restart set to zero."""
    return np.where(restart.reshape(-1, *[1] * (x.ndim - 1)), 0, x)


def _masked(x, mask):
    return x if mask is None or x is None else np.where(np.asarray(mask)[:, :, None, None], x, 0)


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
    lambda0=0.1,
    initial_state=None,
    segment_ids=None,
    mask=None,
    write_gain="unit",
    readout="ratio",
    eps=1e-6,
):
    """The recurrence as printed: (out, (memory, penalty, key_sum), write vectors [B,T,H,D])."""
    query, key, value, direction = (_masked(x, mask) for x in _wide(query, key, value, direction))
    batch, length, heads, dim = key.shape
    query = _groups(query, heads)
    memory, penalty, key_sum = _wide(*(initial_state or (None, None, None)))
    like = (query, key, value, direction, memory, penalty, key_sum, np.asarray(lambda0))
    ridge = _regularizer(lambda0, heads, dim)
    memory = _zeros((batch, heads, dim, value.shape[-1]), *like) if memory is None else memory
    penalty = _zeros((batch, heads, dim, dim), *like) if penalty is None else _symmetric(penalty)
    key_sum = _zeros((batch, heads, dim), *like) if key_sum is None else key_sum
    out = _zeros((*query.shape[:4], value.shape[-1]), *like)
    writes = _zeros(key.shape, *like)
    for t, restart in enumerate(_restarts(segment_ids, batch, length)):
        memory, penalty, key_sum = (_cleared(x, restart) for x in (memory, penalty, key_sum))
        q, k, v = query[:, t], key[:, t], value[:, t]
        unit_key, _ = normalize(k)
        u = unit_key / np.sqrt(dim) if direction is None else direction[:, t]
        penalty = penalty + _outer(u, u)
        alpha = _apply(np.linalg.inv(ridge + penalty), unit_key)
        a = writes[:, t] = _write_vector(alpha, unit_key, write_gain)
        memory = memory + _outer(a, v - _transpose_apply(memory, unit_key))
        key_sum = key_sum + k
        out[:, t] = q @ memory
        if readout == "ratio":
            total = (q @ key_sum[..., None])[..., 0]
            out[:, t] /= np.where(total.real > eps, total, eps)[..., None]
    return out.reshape(batch, length, -1, value.shape[-1]), (memory, penalty, key_sum), writes


def penalty_solve(rhs, direction, *, lambda0, initial_penalty=None, segment_ids=None):
    """((lambda0 I + P_t)^-1 rhs_t with P_t the running sum of u u^T, the last P)."""
    rhs, direction, penalty = _wide(rhs, direction, initial_penalty)
    batch, length, heads, dim = rhs.shape
    like = (rhs, direction, penalty, np.asarray(lambda0))
    penalty = _zeros((batch, heads, dim, dim), *like) if penalty is None else _symmetric(penalty)
    ridge = _regularizer(lambda0, heads, dim)
    solution = _zeros(rhs.shape, *like)
    for t, restart in enumerate(_restarts(segment_ids, batch, length)):
        penalty = _cleared(penalty, restart) + _outer(direction[:, t], direction[:, t])
        solution[:, t] = _apply(np.linalg.inv(ridge + penalty), rhs[:, t])
    return solution, penalty


def delta_rule(query, key, write_key, value, *, initial_memory=None, segment_ids=None):
    """(out, the last memory) of S_t = S_{t-1} + a_t (v_t - S_{t-1}^T k_t)^T, o_t = S_t^T q_t."""
    out, memories = _delta_rule_trace(query, key, write_key, value, initial_memory, segment_ids)
    return out, memories[-1]


def _delta_rule_trace(query, key, write_key, value, initial_memory, segment_ids):
    query, key, write_key, value, memory = _wide(query, key, write_key, value, initial_memory)
    batch, length, heads, dim = key.shape
    query = _groups(query, heads)
    like = (query, key, write_key, value, memory)
    memory = _zeros((batch, heads, dim, value.shape[-1]), *like) if memory is None else memory
    out = _zeros((*query.shape[:4], value.shape[-1]), *like)
    memories = [memory]
    for t, restart in enumerate(_restarts(segment_ids, batch, length)):
        memory = _cleared(memory, restart)
        residual = value[:, t] - _transpose_apply(memory, key[:, t])
        memory = memory + _outer(write_key[:, t], residual)
        out[:, t] = query[:, t] @ memory
        memories.append(memory)
    return out.reshape(batch, length, -1, value.shape[-1]), memories


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
    initial_penalty=None,
    segment_ids=None,
):
    """Gradients for rhs, direction, lambda0 and penalty (the initial one)."""
    rhs, direction, penalty = _wide(rhs, direction, initial_penalty)
    cotangent_solution, d_penalty = _wide(cotangent_solution, cotangent_penalty)
    batch, length, heads, dim = rhs.shape
    penalty = np.zeros((batch, heads, dim, dim)) if penalty is None else _symmetric(penalty)
    d_penalty = np.zeros_like(penalty) if d_penalty is None else d_penalty
    if cotangent_solution is None:
        cotangent_solution = np.zeros_like(rhs)
    ridge = _regularizer(lambda0, heads, dim)
    restarts = _restarts(segment_ids, batch, length)
    penalties = []
    for t in range(length):
        penalty = _cleared(penalty, restarts[t]) + _outer(direction[:, t], direction[:, t])
        penalties.append(penalty)
    d_rhs, d_direction, d_lambda0 = np.zeros_like(rhs), np.zeros_like(rhs), np.zeros(heads)
    for t in reversed(range(length)):
        inverse = np.linalg.inv(ridge + penalties[t])
        alpha = _apply(inverse, rhs[:, t])
        beta = d_rhs[:, t] = _apply(inverse, cotangent_solution[:, t])
        d_penalty = d_penalty - _outer(beta, alpha)
        d_lambda0 -= (beta * alpha).sum((0, -1))
        d_direction[:, t] = 2 * _apply(_symmetric(d_penalty), direction[:, t])
        d_penalty = _cleared(d_penalty, restarts[t])
    return {
        "rhs": d_rhs,
        "direction": d_direction,
        "lambda0": _per_lambda0(d_lambda0, lambda0),
        "penalty": _symmetric(d_penalty),
    }


def delta_rule_grad(
    cotangent_out,
    cotangent_memory,
    query,
    key,
    write_key,
    value,
    *,
    initial_memory=None,
    segment_ids=None,
):
    """Gradients for query, key, write_key, value and memory (the initial one)."""
    _, memories = _delta_rule_trace(query, key, write_key, value, initial_memory, segment_ids)
    query, key, write_key, value = _wide(query, key, write_key, value)
    cotangent_out, d_memory = _wide(cotangent_out, cotangent_memory)
    batch, length, heads, _ = key.shape
    shape, query = query.shape, _groups(query, heads)
    if cotangent_out is None:
        cotangent_out = np.zeros((*shape[:3], value.shape[-1]))
    cotangent_out = _groups(cotangent_out, heads)
    d_memory = np.zeros_like(memories[0]) if d_memory is None else d_memory
    d_query, d_key, d_write_key, d_value = (
        np.zeros_like(x) for x in (query, key, write_key, value)
    )
    restarts = _restarts(segment_ids, batch, length)
    for t in reversed(range(length)):
        before = _cleared(memories[t], restarts[t])
        residual = value[:, t] - _transpose_apply(before, key[:, t])
        d_query[:, t] = cotangent_out[:, t] @ np.swapaxes(memories[t + 1], -1, -2)
        d_memory = d_memory + np.swapaxes(query[:, t], -1, -2) @ cotangent_out[:, t]
        d_write_key[:, t] = _apply(d_memory, residual)
        d_residual = d_value[:, t] = _transpose_apply(d_memory, write_key[:, t])
        d_key[:, t] = -_apply(before, d_residual)
        d_memory = _cleared(d_memory - _outer(key[:, t], d_residual), restarts[t])
    return {
        "query": d_query.reshape(shape),
        "key": d_key,
        "write_key": d_write_key,
        "value": d_value,
        "memory": d_memory,
    }


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


def _ratio_grad(cotangent, numerator, query, key, key_sum, d_key_sum, segment_ids, eps):
    """Adjoint of numerator / max(key_sum . query, eps), all [B,T,H,G,.] but the keys.

    Returns (d_numerator, d_query, d_key, d_key_sum).
    """
    batch, length = key.shape[:2]
    restarts = _restarts(segment_ids, batch, length)
    sums = np.zeros_like(key)
    for t in range(length):
        key_sum = sums[:, t] = _cleared(key_sum, restarts[t]) + key[:, t]
    total = np.einsum("bthgd,bthd->bthg", query, sums)
    floor = np.maximum(total, eps)
    d_total = np.where(total > eps, -(cotangent * numerator).sum(-1) / floor**2, 0)
    d_query = d_total[..., None] * sums[:, :, :, None]
    d_key = np.zeros_like(key)
    for t in reversed(range(length)):
        d_key_sum = d_key_sum + (d_total[:, t, :, :, None] * query[:, t]).sum(2)
        d_key[:, t] = d_key_sum
        d_key_sum = _cleared(d_key_sum, restarts[t])
    return cotangent / floor[..., None], d_query, d_key, d_key_sum


def attention_grad(
    cotangent_out,
    cotangent_state,
    query,
    key,
    value,
    direction=None,
    *,
    lambda0=0.1,
    initial_state=None,
    segment_ids=None,
    mask=None,
    write_gain="unit",
    readout="ratio",
    eps=1e-6,
):
    """Gradients of <cotangent_out, out> + <cotangent_state, state>.

    ``cotangent_state`` is None or (memory, penalty, key_sum), each of them possibly None.
    Keys of the result: query, key, value, direction (None if it was), lambda0, memory, penalty,
    key_sum (the last three of the initial state).
    """
    query, key, value, direction = (_masked(x, mask) for x in _wide(query, key, value, direction))
    batch, _, heads, dim = key.shape
    memory, penalty, key_sum = _wide(*(initial_state or (None, None, None)))
    key_sum = np.zeros((batch, heads, dim)) if key_sum is None else key_sum
    d_memory, d_penalty, d_key_sum = _wide(*(cotangent_state or (None, None, None)))
    d_key_sum = np.zeros_like(key_sum) if d_key_sum is None else d_key_sum
    (cotangent,) = _wide(cotangent_out)
    if cotangent is None:
        cotangent = np.zeros((*query.shape[:3], value.shape[-1]))

    unit_key, _ = normalize(key)
    u = unit_key / np.sqrt(dim) if direction is None else direction
    solve = {"lambda0": lambda0, "initial_penalty": penalty, "segment_ids": segment_ids}
    alpha, _ = penalty_solve(unit_key, u, **solve)
    a = _write_vector(alpha, unit_key, write_gain)
    rule = {"initial_memory": memory, "segment_ids": segment_ids}
    numerator, _ = delta_rule(query, unit_key, a, value, **rule)

    if readout == "ratio":
        d_numerator, d_query, d_key, d_key_sum = _ratio_grad(
            *(_groups(x, heads) for x in (cotangent, numerator, query)),
            key,
            key_sum,
            d_key_sum,
            segment_ids,
            eps,
        )
        d_numerator, d_query = d_numerator.reshape(cotangent.shape), d_query.reshape(query.shape)
    else:
        restarts = _restarts(segment_ids, *key.shape[:2])
        d_numerator, d_query, d_key = cotangent, np.zeros_like(query), np.zeros_like(key)
        for t in reversed(range(key.shape[1])):
            d_key[:, t] = d_key_sum
            d_key_sum = _cleared(d_key_sum, restarts[t])
    rule_grad = delta_rule_grad(d_numerator, d_memory, query, unit_key, a, value, **rule)
    d_alpha, d_unit_key = _write_vector_grad(rule_grad["write_key"], alpha, unit_key, write_gain)
    solve_grad = penalty_solve_grad(d_alpha, d_penalty, unit_key, u, **solve)
    d_unit_key = d_unit_key + rule_grad["key"] + solve_grad["rhs"]
    if direction is None:
        d_unit_key = d_unit_key + solve_grad["direction"] / np.sqrt(dim)
    return {
        "query": _masked(d_query + rule_grad["query"], mask),
        "key": _masked(d_key + _normalize_grad(d_unit_key, key), mask),
        "value": _masked(rule_grad["value"], mask),
        "direction": None if direction is None else _masked(solve_grad["direction"], mask),
        "lambda0": solve_grad["lambda0"],
        "memory": rule_grad["memory"],
        "penalty": solve_grad["penalty"],
        "key_sum": d_key_sum,
    }
