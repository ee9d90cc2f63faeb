"""``penalty_solve`` with weights and decay, or at several right-hand sides a token.

Equations (38) to (40) of ``docs/derivation.md``. ``λ₀`` does not decay, so the matrix of a token is
no low-rank update of the one before it. But all tokens are independent once the penalty at the
starts of their chunks is known, and are solved by conjugate gradients side by side: one step is
three matrix products a chunk. float64 is solved directly, by Cholesky.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import Solve, SolveOutputs
from vla_jax.chunks import Blocks, Scans
from vla_jax.decay import Decay, RunningSum, crossing, effective, running_sum
from vla_jax.plan import Plan
from vla_jax.types import Array

# Tokens of a chunk: a penalty and its inverse each, from which its tokens start. And chunks side
# by side: what they take of memory is there once, whatever T is.
CHUNK_SIZE = 16
SPAN = 64

# A row is done when its residual is below this share of the right-hand side; and the steps after
# which it is left as it is, more than λ₀ from .01 of the largest β‖u‖² on ever takes.
TOLERANCE = 3e-6
COARSE_TOLERANCE = 3e-4
MAX_STEPS = 96

# A token starts from the inverse at its chunk's start if at least so much of the penalty is left.
# That inverse knows nothing of what has decayed: where more has, none is better.
PRECONDITION_FROM = 0.5


class Solved(NamedTuple):
    """What the backward keeps of the forward."""

    solution: Array  # [B, T, Hq, D], wide
    starts: tuple[Array, Array]  # the penalty where each block starts, and its rest


class Report(NamedTuple):
    """How the solve went, a token and query head, ``[B, T, Hq]``.

    Attributes:
      residual: ``‖rhs − M solution‖ / ‖rhs‖`` by the solver's own recursion, 0 for a zero rhs.
      steps: of conjugate gradients, 0 where the solve is direct.
    """

    residual: Array
    steps: Array


# --- the matrices of the tokens ------------------------------------------------------------------


def _coarse(policy: numerics.Policy) -> bool:
    """Whether products round their operands to tf32."""
    return policy.precision not in (_HIGHEST, (_HIGHEST, _HIGHEST), *_ACCURATE)


_HIGHEST = jax.lax.Precision.HIGHEST
_PRESET = jax.lax.DotAlgorithmPreset
_ACCURATE = (
    _PRESET.F32_F32_F32,
    _PRESET.F64_F64_F64,
    _PRESET.TF32_TF32_F32_X3,
    _PRESET.BF16_BF16_F32_X6,
    _PRESET.BF16_BF16_F32_X9,
)


def _to_tf32(x: Array) -> Array:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


def _split(x: Array) -> tuple[Array, ...]:
    """``x`` as the sum of two arrays that tf32 holds."""
    high = _to_tf32(x)
    return high, x - high


class Pulled(NamedTuple):
    """Cotangents of a block's directions ``[N, B, H, C, D]``, and of its gates ``[..., C, 1]``."""

    direction: Array
    weight: Array
    log_decay: Array


class Matrices(NamedTuple):
    """``M_t = λ₀ I + exp(g_t) P_c + Σ_{s≤t} Γ[t, s] β_s u_s u_sᵀ`` of all tokens of a block."""

    u: Array  # [N, B, H, C, D]
    weight: Array | None  # [N, B, H, C, 1]
    decay: Decay
    starts: Array  # P_c, [N, B, H, D, D]
    lambda0: Array  # [H]

    @classmethod
    def of(
        cls, u: Array, weight: Array | None, log_decay: Array, carry: tuple[Array, Array],
        lambda0: Array, policy: numerics.Policy, running_sum: RunningSum,
    ) -> tuple[Matrices, tuple[Array, Array]]:  # fmt: skip
        """From the penalty and its rest before the block; also those after it."""
        decay = Decay.of(log_decay)
        weighted = u if weight is None else weight * u
        gram = policy.dot("...td,...te->...de", decay.until * weighted, u)
        starts, carry = running_sum(gram, decay.log_total, carry)
        return cls(u, weight, decay, starts, lambda0), carry

    @property
    def pairs(self) -> Array:
        """``Γ[t, s] β_s``, ``[N, B, H, C, C]``."""
        if self.weight is None:
            return self.decay.within
        return self.decay.within * jnp.swapaxes(self.weight, -1, -2)

    def product(self, policy: numerics.Policy) -> Callable[[Array], Array]:
        """``x ↦ M x`` for ``[N, B, H, G, C, D]``: one vector a token."""
        dot = policy.dot
        starts = _split(self.starts) if _coarse(policy) else (self.starts,)
        pairs, since = (x[:, :, :, None] for x in (self.pairs, self.decay.since))
        lambda0 = self.lambda0[:, None, None, None]

        def product(x):
            carried = sum(dot("nbhgtd,nbhde->nbhgte", x, part) for part in starts)
            scores = dot("nbhgtd,nbhsd->nbhgts", x, self.u) * pairs
            own = dot("nbhgts,nbhsd->nbhgtd", scores, self.u)
            return lambda0 * x + since * carried + own

        return product

    def preconditioner(self, policy: numerics.Policy) -> Callable[[Array], Array]:
        """``(λ₀ I + P_c)⁻¹`` for the tokens to which it is near, nothing for the others."""
        inverse = numerics.positive_definite_inverse(
            numerics.regularised(self.starts, self.lambda0)
        )
        finite = jnp.all(jnp.isfinite(inverse), axis=(-2, -1), keepdims=True)
        inverse = jnp.where(finite, inverse, 0)
        near = ((self.decay.since >= PRECONDITION_FROM) & finite)[:, :, :, None]
        return lambda x: jnp.where(near, policy.dot("nbhgtd,nbhde->nbhgte", x, inverse), x)

    def solve(self, rhs: Array, policy: numerics.Policy) -> tuple[Array, Report]:
        """``M_t⁻¹ rhs_t`` for ``[N, B, H, G, C, D]``; and how it went, ``[N, B, H, G, C, 1]``."""
        scale, rhs = _scaled(rhs)
        if policy.accumulator == jnp.float64:
            solution = self._direct(rhs)
            misfit = rhs - self.product(policy)(solution)
            report = Report(_share(misfit, rhs), jnp.zeros(scale.shape, int))
        else:
            solution, report = _conjugate_gradients(
                self.product(policy), self.preconditioner(policy), rhs, _coarse(policy)
            )
        return solution * scale, report

    def pull(self, x: Array, y: Array, later: Array, policy: numerics.Policy) -> Pulled:
        """Equations (39) and (40) within chunks.

        Args:
          x, y: the solution and that of its cotangent, ``[N, B, H, G, C, D]``.
          later: R, the symmetric cotangent of the penalty from behind each chunk.
          policy: of the products.
        """
        dot, decay, u, weight = policy.dot, self.decay, self.u, self.weight
        u_later = dot("...td,...de->...te", u, later)
        x_u, y_u = (dot("nbhgsd,nbhtd->nbhgst", part, u) for part in (x, y))
        pulled = decay.until * u_later
        within = decay.within[:, :, :, None]
        for overlap, part in ((x_u, y), (y_u, x)):
            pulled = pulled - dot("nbhgst,nbhgsd->nbhtd", overlap * within, part) / 2

        x_start = dot("nbhgtd,nbhde->nbhgte", x, self.starts)
        y_since = decay.since[:, :, :, None] * y
        to_end = decay.until * jnp.sum(u * u_later, axis=-1, keepdims=True)
        d_log_decay = crossing(
            -jnp.tril(self.pairs, -1) * jnp.sum(x_u * y_u, axis=3),
            -jnp.sum(y_since * x_start, axis=(3, -1))[..., None],
            to_end if weight is None else weight * to_end,
            decay.total * jnp.sum(later * self.starts, axis=(-2, -1), keepdims=True),
        )
        return Pulled(
            2 * pulled if weight is None else 2 * weight * pulled,
            jnp.sum(u * pulled, axis=-1, keepdims=True),
            d_log_decay,
        )

    def _direct(self, rhs: Array) -> Array:
        """By Cholesky, one chunk after the other: a D×D matrix for each of its tokens at a time."""

        def chunk(inputs):
            pairs, since, starts, u, rhs = inputs
            identity = self.lambda0[:, None, None, None] * jnp.eye(u.shape[-1], dtype=u.dtype)
            matrix = identity + since[..., None] * starts[:, :, None]
            matrix = matrix + jnp.einsum("bhts,bhsd,bhse->bhtde", pairs, u, u, precision=_HIGHEST)
            factor = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
            x = jnp.moveaxis(rhs, 2, -1)  # [B, H, C, D, G]
            for transpose in (False, True):
                x = jax.lax.linalg.triangular_solve(
                    factor, x, left_side=True, lower=True, transpose_a=transpose
                )
            return jnp.moveaxis(x, -1, 2)

        return jax.lax.map(chunk, (self.pairs, self.decay.since, self.starts, self.u, rhs))


# --- conjugate gradients -------------------------------------------------------------------------


def _scaled(x: Array) -> tuple[Array, Array]:
    """A power of two a row, 1 for a row of zeros, and the rows over it: of size about 1."""
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    away = jnp.where(peak > 1, 0.5, 1).astype(x.dtype)  # so that it does not round to infinity
    bits = jnp.finfo(x.dtype)
    power = jax.lax.reduce_precision(peak * away, bits.nexp, 0)
    power = jnp.where((peak > 0) & jnp.isfinite(peak), power, 1)
    away = jnp.where(power > 1, 2.0**-8, 1).astype(x.dtype)  # and its inverse is a normal number
    return power, x * (1 / (power * away)) * away


def _share(residual: Array, rhs: Array) -> Array:
    """``‖residual‖ / ‖rhs‖`` a row, 0 where both are zero."""
    top, bottom = (jnp.sum(x * x, axis=-1, keepdims=True) for x in (residual, rhs))
    return jnp.sqrt(top / jnp.where(bottom == 0, 1, bottom))


def _conjugate_gradients(
    product: Callable[[Array], Array],
    preconditioner: Callable[[Array], Array],
    rhs: Array,
    coarse: bool,
) -> tuple[Array, Report]:
    """Each row of ``rhs`` for itself, until its recursive residual is small.

    The step lengths come from the product itself, not from a recursion: so ``p`` may be rounded
    to what a coarse product holds exactly, and the residual stays that of ``x``.
    """
    rounded = _to_tf32 if coarse else lambda x: x
    tolerance = COARSE_TOLERANCE if coarse else TOLERANCE

    def inner(x, y):
        return jnp.sum(x * y, axis=-1, keepdims=True)

    size = inner(rhs, rhs)
    limit = tolerance**2 * size

    def body(state):
        i, x, r, p, active, steps = state
        q = product(p)
        curvature = inner(p, q)
        going = active & ~(curvature <= 0)  # not a number goes on, into the solution
        safe = jnp.where(curvature <= 0, 1, curvature)
        step = jnp.where(going, inner(p, r) / safe, 0)
        x, r = x + step * p, r - step * q
        still = going & (inner(r, r) > limit)
        z = preconditioner(r)
        p = jnp.where(still, rounded(z - inner(z, q) / safe * p), 0)
        return i + 1, x, r, p, still, steps + active.astype(steps.dtype)

    finite = jnp.isfinite(size)
    active = finite & (size > 0)
    p = jnp.where(active, rounded(preconditioner(rhs)), 0)
    start = jnp.zeros_like(rhs), rhs, p, active, jnp.zeros(size.shape, int)
    start = 0, *numerics.varying_alike(start)
    _, x, r, *_, steps = jax.lax.while_loop(
        lambda state: (state[0] < MAX_STEPS) & jnp.any(state[4]), body, start
    )
    return jnp.where(finite, x, jnp.nan), Report(_share(r, rhs), steps)


# --- forward and backward ------------------------------------------------------------------------


def _span(scans: Scans) -> int | None:
    """Chunks side by side: as many as ``SPAN``, or all where the scan is over all."""
    return None if scans.span is None else SPAN


def _cut(plan: Plan, inputs: Solve, span: int | None) -> Blocks:
    # A longer chunk than its own would have tokens too far from what they start from.
    chunk = min(plan.chunk_size or CHUNK_SIZE, CHUNK_SIZE)
    return Blocks.of(inputs.direction.shape[1], chunk, span)


def _gates(plan: Plan, inputs: Solve) -> tuple[Array, ...]:
    """Directions, the decay with the segments and, where there is one, the weight."""
    dtype = plan.policy.accumulator
    log_decay = effective(inputs.log_decay, inputs.direction, inputs.segment_ids, dtype)
    weight = () if inputs.weight is None else (inputs.weight[..., None],)
    return inputs.direction, log_decay, *weight


def _block(
    plan: Plan, lambda0: Array, running_sum: RunningSum, carry: Any, u: Array, log_decay: Array,
    weight: Array | None = None,
) -> tuple[Matrices, Any]:  # fmt: skip
    return Matrices.of(u, weight, log_decay, carry, lambda0, plan.policy, running_sum)


def _grouped(x: Array, u: Array) -> Array:
    """``[N, B, Hq, C, D]`` to ``[N, B, H, G, C, D]``."""
    return x.reshape(*u.shape[:3], -1, *u.shape[3:])


def _ungrouped(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _forward(plan, inputs, running_sum, span, reported):
    heads = inputs.rhs.shape[2]

    def step(carry, chunks, *_):
        rhs, *gates = chunks
        matrices, after = _block(plan, inputs.lambda0, running_sum, carry, *gates)
        solution, report = matrices.solve(_grouped(rhs, matrices.u), plan.policy)
        results = [solution, report.residual, report.steps.astype(rhs.dtype)]
        return after, [_ungrouped(x) for x in results[: 3 if reported else 1]], carry

    shapes = [inputs.rhs.shape[2:], (heads, 1), (heads, 1)][: 3 if reported else 1]
    return _cut(plan, inputs, span).scan(
        step, (inputs.penalty, jnp.zeros_like(inputs.penalty)),
        (inputs.rhs, *_gates(plan, inputs)), shapes, None, dtype=plan.policy.accumulator,
    )  # fmt: skip


def forward(plan: Plan, inputs: Solve, *, scans: Scans) -> tuple[SolveOutputs, Solved]:
    """Equation (38): the solution, wide, and the penalty after the last token."""
    (penalty, _), (solution,), starts = _forward(
        plan, inputs, scans.decayed_sum, _span(scans), False
    )
    return SolveOutputs(solution, penalty), Solved(solution, starts)


def report(plan: Plan, inputs: Solve) -> Report:
    """How the forward's solve goes, a token and query head."""
    _, (_, residual, steps), _ = _forward(plan, inputs, running_sum, SPAN, True)
    return Report(residual[..., 0], steps[..., 0].astype(int))


def residual(plan: Plan, inputs: Solve, solution: Array) -> Array:
    """``‖rhs − M solution‖ / ‖rhs‖`` a token and query head, ``[B, T, Hq]``: one product with M.

    In float32 it rounds at about ``ε ‖M‖ ‖solution‖ / ‖rhs‖``.
    """

    def step(carry, chunks, *_):
        rhs, solution, *gates = chunks
        matrices, carry = _block(plan, inputs.lambda0, running_sum, carry, *gates)
        rhs, solution = (_grouped(x, matrices.u) for x in (rhs, solution))
        power, rhs = _scaled(rhs)
        misfit = rhs - matrices.product(plan.policy)(solution / power)
        return carry, [_ungrouped(_share(misfit, rhs))], None

    _, (residual,), _ = _cut(plan, inputs, SPAN).scan(
        step, (inputs.penalty, jnp.zeros_like(inputs.penalty)),
        (inputs.rhs, solution, *_gates(plan, inputs)), [(inputs.rhs.shape[2], 1)], None,
        dtype=plan.policy.accumulator,
    )  # fmt: skip
    return residual[..., 0]


def backward(
    plan: Plan,
    inputs: Solve,
    saved: Solved,
    cotangents: SolveOutputs,
    *,
    scans: Scans,
) -> Solve:
    """Equations (39) and (40): a bundle of the inputs' type, wide; that of the decay direct.

    The cotangent of ``rhs`` is the same solve once more. That of the returned penalty counts by
    its symmetric part.
    """
    dot, running_sum, span = plan.policy.dot, scans.decayed_sum, _span(scans)
    gates = _gates(plan, inputs)

    def step(carry, chunks, _, start):
        d_solution, x, *gates = chunks
        m, _ = _block(plan, inputs.lambda0, running_sum, start, *gates)
        x, d_solution = (_grouped(part, m.u) for part in (x, d_solution))
        y, _ = m.solve(d_solution, plan.policy)

        y_since = m.decay.since[:, :, :, None] * y
        outer = -dot("nbhgtd,nbhgte->nbhde", y_since, x)
        later, carry = running_sum(
            numerics.symmetrize(outer), m.decay.log_total, carry, reverse=True
        )
        pulled = m.pull(x, y, later, plan.policy)
        gradients = [_ungrouped(y), pulled.direction, pulled.log_decay]
        if m.weight is not None:
            gradients.append(pulled.weight)
        return carry, gradients, -jnp.sum(x * y, axis=(0, 1, 3, 4, 5))

    later = numerics.symmetrize(cotangents.penalty)
    tokens = cotangents.solution, saved.solution, *gates
    shapes = [x.shape[2:] for x in (inputs.rhs, *gates)]
    (d_penalty, rest), gradients, d_lambda0 = _cut(plan, inputs, span).scan(
        step, (later, jnp.zeros_like(later)), tokens, shapes, None, saved.starts,
        dtype=plan.policy.accumulator, reverse=True,
    )  # fmt: skip
    d_rhs, d_direction, d_log_decay, *d_weight = gradients
    return inputs._replace(
        rhs=d_rhs,
        direction=d_direction,
        lambda0=jnp.sum(d_lambda0, axis=0),
        penalty=d_penalty + rest,
        segment_ids=None,
        weight=d_weight[0][..., 0] if d_weight else None,
        log_decay=None if inputs.log_decay is None else d_log_decay[..., 0],
    )
