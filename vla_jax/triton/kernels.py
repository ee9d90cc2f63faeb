"""The kernels of `vla_jax.triton`, in Triton's own language; importing this needs ``triton``.

One program a head, grid ``(B·H,)``; the head of ``__init__.py`` beside this explains the method and
the four sweeps of the backward. Notation:

    A [D, D]  running inverse          S [D, E]  memory, key dimension first
    R [D, E]  cotangent of S           X [D, D]  cotangent of the penalty, and its transpose
    z [D]     key sum                  k, n      raw key, unit key
    D, E      powers of two; loads are masked to DIM and VALUE_DIM, so arrays need no padding

Arrays are contiguous: tokens ``[B, T, H, ·]``, state ``[B, H, ·, ·]``. Offsets are 64 bits wide.

Registers: one matrix at a time, ``[D, D]`` or ``[D, E]`` in float32: 64 numbers a thread at
D = E = 128 (8 warps). Shared memory: what Triton's sums over rows and columns need of it.

Hazards. What the threads of a program pass on through device memory needs ``tl.debug_barrier``
between write and read. Vectors shorter than the threads are held in copies, whose sums may differ
in the last bit (triton-lang/triton 7264); repeated calls were bitwise equal all the same.
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _inverse_norm(x):
    """1 / |x| of a vector, 0 for the zero vector; finite, whatever the vector."""
    peak = tl.max(tl.abs(x), 0)
    scale = 1.0 / tl.maximum(peak, _TINY)
    scaled = x * scale
    square = tl.sum(scaled * scaled, 0)
    inverse = tl.rsqrt(tl.where(peak > 0, square, 1.0)) * scale
    return tl.where(peak > 0, tl.minimum(inverse, 1.0 / _TINY), 0.0)


@triton.jit
def _identity(D: tl.constexpr, scale):
    rows, cols = tl.arange(0, D)[:, None], tl.arange(0, D)[None, :]
    return tl.where(rows == cols, scale, 0.0)


@triton.jit
def _derive(P, lam, D: tl.constexpr):
    """(lam I + P)^-1 by the sweep operator; a zero P costs nothing."""
    rows, cols = tl.arange(0, D)[:, None], tl.arange(0, D)[None, :]
    index = tl.arange(0, D)
    count = tl.where(tl.max(tl.max(tl.abs(P), 1), 0) > 0, D, 0)
    M = P + _identity(D, lam)
    for j in range(count):
        row = tl.sum(tl.where(rows == j, M, 0.0), 0)
        pivot = tl.maximum(tl.sum(tl.where(index == j, row, 0.0), 0), lam)
        row = tl.where(index == j, -1.0, row) * tl.rsqrt(pivot)
        M = tl.where((rows == j) | (cols == j), 0.0, M) - row[:, None] * row[None, :]
    return tl.where(count > 0, -M, _identity(D, 1.0 / lam))


@triton.jit
def _update(A, u, x):
    """Sherman-Morrison, and the product of the new inverse with x."""
    w = tl.sum(u[:, None] * A, 0)
    y = tl.sum(x[:, None] * A, 0)
    w = w * tl.rsqrt(1.0 + tl.sum(u * w, 0))
    return A - w[:, None] * w[None, :], y - w * tl.sum(w * x, 0)


@triton.jit
def _load(pointer, offset, index, width):
    return tl.load(pointer + offset + index, mask=index < width, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, offset, index, width, x):
    tl.store(pointer + offset + index, x.to(pointer.dtype.element_ty), mask=index < width)


@triton.jit
def _direction(u_ptr, offset, index, n, DIM: tl.constexpr, LEARNED: tl.constexpr):
    if LEARNED:
        return _load(u_ptr, offset, index, DIM)
    else:
        return n * (DIM**-0.5)


@triton.jit
def _starts(seg_ptr, b, t, T, SEGMENTS: tl.constexpr):
    """Whether the state restarts just before token t."""
    if SEGMENTS:
        row = seg_ptr + b * T
        start = tl.load(row + t) != tl.load(row + tl.maximum(t - 1, 0))
    else:
        start = False
    return start


@triton.jit
def _accumulate(
    p_ptr, p_off, p_mask, u_ptr, k_ptr, seg_ptr, b, h, first, count, T, H, d,
    DIM: tl.constexpr, LEARNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Advances the penalty in memory by the tokens of a block."""
    P = tl.load(p_ptr + p_off, mask=p_mask, other=0.0)
    for i in range(count):
        t = first + i
        x = ((b * T + t) * H + h) * DIM
        k = _load(k_ptr, x, d, DIM)
        u = _direction(u_ptr, x, d, k * _inverse_norm(k), DIM, LEARNED)
        if SEGMENTS:
            P = tl.where(_starts(seg_ptr, b, t, T, SEGMENTS), 0.0, P)
        P += u[:, None] * u[None, :]
    tl.debug_barrier()
    tl.store(p_ptr + p_off, P, mask=p_mask)
    tl.debug_barrier()


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, u_ptr, seg_ptr, lam_ptr, s_in, p_in, z_in,
    o_ptr, s_ptr, p_ptr, z_ptr, alpha_ptr, gain_ptr, r_ptr, weight_ptr,
    T, H: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    GAIN: tl.constexpr, RATIO: tl.constexpr, LEARNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The recurrence, equations (1) to (5): outputs, final state and what the backward needs."""
    stream = tl.program_id(0).to(tl.int64)
    b, h = stream // H, stream % H
    d, e = tl.arange(0, D), tl.arange(0, E)
    lam = tl.load(lam_ptr + stream)
    s_off = stream * DIM * VALUE_DIM + d[:, None] * VALUE_DIM + e[None, :]
    s_mask = (d[:, None] < DIM) & (e[None, :] < VALUE_DIM)
    p_off = stream * DIM * DIM + d[:, None] * DIM + d[None, :]
    p_mask = (d[:, None] < DIM) & (d[None, :] < DIM)
    tl.store(p_ptr + p_off, tl.load(p_in + p_off, mask=p_mask, other=0.0), mask=p_mask)
    tl.debug_barrier()
    for first in range(0, T, BLOCK):
        count = tl.minimum(T - first, BLOCK)
        A = _derive(tl.load(p_ptr + p_off, mask=p_mask, other=0.0), lam, D)
        for i in range(count):
            t = first + i
            token = (b * T + t) * H + h
            if SEGMENTS:
                A = tl.where(_starts(seg_ptr, b, t, T, SEGMENTS), _identity(D, 1.0 / lam), A)
            k = _load(k_ptr, token * DIM, d, DIM)
            n = k * _inverse_norm(k)
            u = _direction(u_ptr, token * DIM, d, n, DIM, LEARNED)
            A, alpha = _update(A, u, n)
            if GAIN == 0:
                gain = _inverse_norm(alpha)
            elif GAIN == 1:
                overlap = tl.sum(alpha * n, 0)
                gain = tl.where(overlap > 0, 1.0 / tl.where(overlap > 0, overlap, 1.0), 0.0)
            else:
                gain = 1.0
            _store(alpha_ptr, token * DIM, d, DIM, alpha)
            tl.store(gain_ptr + token, gain)
        _accumulate(
            p_ptr, p_off, p_mask, u_ptr, k_ptr, seg_ptr, b, h, first, count, T, H, d,
            DIM, LEARNED, SEGMENTS,
        )  # fmt: skip

    S = tl.load(s_in + s_off, mask=s_mask, other=0.0)
    z = _load(z_in, stream * DIM, d, DIM)
    for t in range(T):
        token = (b * T + t) * H + h
        if SEGMENTS:
            start = _starts(seg_ptr, b, t, T, SEGMENTS)
            S = tl.where(start, 0.0, S)
            z = tl.where(start, 0.0, z)
        k = _load(k_ptr, token * DIM, d, DIM)
        n = k * _inverse_norm(k)
        a = _load(alpha_ptr, token * DIM, d, DIM) * tl.load(gain_ptr + token)
        r = _load(v_ptr, token * VALUE_DIM, e, VALUE_DIM) - tl.sum(n[:, None] * S, 0)
        S += a[:, None] * r[None, :]
        z += k
        _store(r_ptr, token * VALUE_DIM, e, VALUE_DIM, r)
        for g in range(G):
            qh = token * G + g
            q = _load(q_ptr, qh * DIM, d, DIM)
            o = tl.sum(q[:, None] * S, 0)
            weight = tl.sum(q * z, 0)
            if RATIO:
                o = o / tl.maximum(weight, EPS)
            tl.store(weight_ptr + qh, weight)
            _store(o_ptr, qh * VALUE_DIM, e, VALUE_DIM, o)
    tl.store(s_ptr + s_off, S, mask=s_mask)
    _store(z_ptr, stream * DIM, d, DIM, z)


@triton.jit
def backward(
    q_ptr, k_ptr, v_ptr, u_ptr, seg_ptr, lam_ptr, s_in, p_in, z_in,
    alpha_ptr, gain_ptr, r_ptr, weight_ptr, do_ptr, ds_in, dp_in, dz_in,
    dq_ptr, dk_ptr, dv_ptr, du_ptr, dlam_ptr, ds_ptr, dp_ptr, dz_ptr,
    p_ptr, dr_ptr, beta_ptr, dn_ptr, dweight_ptr, overlap_ptr,
    T, H: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    GAIN: tl.constexpr, RATIO: tl.constexpr, LEARNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """All cotangents, in four sweeps; the last six arrays are scratch."""
    stream = tl.program_id(0).to(tl.int64)
    b, h = stream // H, stream % H
    d, e = tl.arange(0, D), tl.arange(0, E)
    lam = tl.load(lam_ptr + stream)
    s_off = stream * DIM * VALUE_DIM + d[:, None] * VALUE_DIM + e[None, :]
    s_mask = (d[:, None] < DIM) & (e[None, :] < VALUE_DIM)
    p_off = stream * DIM * DIM + d[:, None] * DIM + d[None, :]
    p_mask = (d[:, None] < DIM) & (d[None, :] < DIM)

    # First sweep, from the end: the cotangents of the residual and of alpha.
    R = tl.load(ds_in + s_off, mask=s_mask, other=0.0)
    for i in range(T):
        t = T - 1 - i
        token = (b * T + t) * H + h
        k = _load(k_ptr, token * DIM, d, DIM)
        n = k * _inverse_norm(k)
        alpha = _load(alpha_ptr, token * DIM, d, DIM)
        gain = tl.load(gain_ptr + token)
        r = _load(r_ptr, token * VALUE_DIM, e, VALUE_DIM)
        for g in range(G):
            qh = token * G + g
            q = _load(q_ptr, qh * DIM, d, DIM)
            do = _load(do_ptr, qh * VALUE_DIM, e, VALUE_DIM)
            if RATIO:
                do = do / tl.maximum(tl.load(weight_ptr + qh), EPS)
            R += q[:, None] * do[None, :]
        dwrite = tl.sum(R * r[None, :], 1)
        dr = tl.sum((alpha * gain)[:, None] * R, 0)
        if GAIN == 2:
            dalpha = dwrite
            overlap = 0.0
        else:
            overlap = tl.sum(dwrite * alpha, 0) * gain
            if GAIN == 0:
                dalpha = gain * (dwrite - overlap * gain * alpha)
            else:
                dalpha = gain * (dwrite - overlap * n)
        _store(dv_ptr, token * VALUE_DIM, e, VALUE_DIM, dr)
        _store(dr_ptr, token * VALUE_DIM, e, VALUE_DIM, dr)
        _store(beta_ptr, token * DIM, d, DIM, dalpha)
        tl.store(overlap_ptr + token, overlap)
        R -= n[:, None] * dr[None, :]
        if SEGMENTS:
            R = tl.where(_starts(seg_ptr, b, t, T, SEGMENTS), 0.0, R)
    tl.store(ds_ptr + s_off, R, mask=s_mask)

    # Second sweep, from the start: A once more, and beta.
    tl.store(p_ptr + p_off, tl.load(p_in + p_off, mask=p_mask, other=0.0), mask=p_mask)
    tl.debug_barrier()
    dlam = 0.0
    for first in range(0, T, BLOCK):
        count = tl.minimum(T - first, BLOCK)
        A = _derive(tl.load(p_ptr + p_off, mask=p_mask, other=0.0), lam, D)
        for i in range(count):
            t = first + i
            token = (b * T + t) * H + h
            if SEGMENTS:
                A = tl.where(_starts(seg_ptr, b, t, T, SEGMENTS), _identity(D, 1.0 / lam), A)
            k = _load(k_ptr, token * DIM, d, DIM)
            u = _direction(u_ptr, token * DIM, d, k * _inverse_norm(k), DIM, LEARNED)
            A, beta = _update(A, u, _load(beta_ptr, token * DIM, d, DIM))
            dlam -= tl.sum(_load(alpha_ptr, token * DIM, d, DIM) * beta, 0)
            tl.debug_barrier()
            _store(beta_ptr, token * DIM, d, DIM, beta)
        if first + BLOCK < T:
            _accumulate(
                p_ptr, p_off, p_mask, u_ptr, k_ptr, seg_ptr, b, h, first, count, T, H, d,
                DIM, LEARNED, SEGMENTS,
            )  # fmt: skip
    tl.store(dlam_ptr + stream, dlam)
    tl.debug_barrier()

    # Third sweep, from the start: S once more, and what it multiplies.
    S = tl.load(s_in + s_off, mask=s_mask, other=0.0)
    z = _load(z_in, stream * DIM, d, DIM)
    for t in range(T):
        token = (b * T + t) * H + h
        if SEGMENTS:
            start = _starts(seg_ptr, b, t, T, SEGMENTS)
            S = tl.where(start, 0.0, S)
            z = tl.where(start, 0.0, z)
        a = _load(alpha_ptr, token * DIM, d, DIM) * tl.load(gain_ptr + token)
        dr = _load(dr_ptr, token * VALUE_DIM, e, VALUE_DIM)
        dn = _load(beta_ptr, token * DIM, d, DIM) - tl.sum(S * dr[None, :], 1)
        if GAIN == 1:
            dn -= tl.load(overlap_ptr + token) * a
        _store(dn_ptr, token * DIM, d, DIM, dn)
        S += a[:, None] * _load(r_ptr, token * VALUE_DIM, e, VALUE_DIM)[None, :]
        z += _load(k_ptr, token * DIM, d, DIM)
        for g in range(G):
            qh = token * G + g
            do = _load(do_ptr, qh * VALUE_DIM, e, VALUE_DIM)
            if RATIO:
                weight = tl.load(weight_ptr + qh)
                do = do / tl.maximum(weight, EPS)
            dq = tl.sum(S * do[None, :], 1)
            if RATIO:
                q = _load(q_ptr, qh * DIM, d, DIM)
                dweight = -tl.sum(q * dq, 0) / tl.maximum(weight, EPS)
                dweight = tl.where(weight > EPS, dweight, 0.0)
                tl.store(dweight_ptr + qh, dweight)
                dq += dweight * z
            _store(dq_ptr, qh * DIM, d, DIM, dq)
    tl.debug_barrier()

    # Fourth sweep, from the end: the direction's cotangent, and all of the key's.
    X = tl.load(dp_in + p_off, mask=p_mask, other=0.0)
    dz = _load(dz_in, stream * DIM, d, DIM)
    for i in range(T):
        t = T - 1 - i
        token = (b * T + t) * H + h
        k = _load(k_ptr, token * DIM, d, DIM)
        inverse_norm = _inverse_norm(k)
        n = k * inverse_norm
        u = _direction(u_ptr, token * DIM, d, n, DIM, LEARNED)
        alpha = _load(alpha_ptr, token * DIM, d, DIM)
        beta = _load(beta_ptr, token * DIM, d, DIM)
        dn = _load(dn_ptr, token * DIM, d, DIM)
        X -= alpha[:, None] * beta[None, :] + beta[:, None] * alpha[None, :]
        du = tl.sum(u[:, None] * X, 0)
        if LEARNED:
            _store(du_ptr, token * DIM, d, DIM, du)
        else:
            dn += du * (DIM**-0.5)
        if RATIO:
            for g in range(G):
                qh = token * G + g
                dz += _load(q_ptr, qh * DIM, d, DIM) * tl.load(dweight_ptr + qh)
        dk = dz + (dn - tl.sum(dn * n, 0) * n) * inverse_norm
        _store(dk_ptr, token * DIM, d, DIM, dk)
        if SEGMENTS:
            start = _starts(seg_ptr, b, t, T, SEGMENTS)
            X = tl.where(start, 0.0, X)
            dz = tl.where(start, 0.0, dz)
    tl.store(dp_ptr + p_off, X * 0.5, mask=p_mask)
    _store(dz_ptr, stream * DIM, d, DIM, dz)
