"""The penalty solve's kernels for Hopper GPUs: interpreted against the oracle, lowered for CUDA.

``JAX_PLATFORMS=cuda`` on a Hopper GPU compiles and runs them instead of interpreting.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import support
import tolerances

from vla_jax.bundles import Solve
from vla_jax.pallas.mosaic import backend, penalty_solve

BF16 = jnp.bfloat16
ON_DEVICE = jax.default_backend() == "gpu"


def draw(batch, length, heads, groups, dim, *, gates=True, ids=None, wide=False, seed=0):
    """Unit directions that overlap, gates of any size, one token absent; lambda0 a head."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    u = normal((batch, length, heads, dim)) + 0.5
    u /= np.linalg.norm(u, axis=-1, keepdims=True)
    u[:, length // 2] = 0
    root = normal((batch, heads, dim, dim)) / np.sqrt(dim)
    log_decay = -np.exp(normal((batch, length, heads)) - 3)
    log_decay[:, ::29], log_decay[:, 3::31] = -30, -1e30
    weight = rng.uniform(0, 1, (batch, length, heads))
    weight[:, 5::7] = 0
    return Solve(
        rhs=jnp.asarray(
            normal((batch, length, heads * groups, dim)), jnp.float32 if wide else BF16
        ),
        direction=jnp.asarray(u, BF16),
        lambda0=jnp.asarray(rng.uniform(0.2, 2, (batch, heads)), jnp.float32),
        penalty=jnp.asarray(root @ root.swapaxes(2, 3), jnp.float32),
        segment_ids=None if ids is None else jnp.asarray(ids, jnp.int32),
        weight=jnp.asarray(weight, jnp.float32) if gates else None,
        log_decay=jnp.asarray(log_decay, jnp.float32) if gates else None,
    )


def wide(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def arguments(inputs, b):
    """What the oracle gets of one sequence, since its ``lambda0`` has no batch."""
    arrays = {n: wide(x) for n, x in inputs._asdict().items() if n != "segment_ids"}
    one = {n: None if x is None else x[b : b + 1] for n, x in arrays.items()}
    one["lambda0"], one["initial_penalty"] = one["lambda0"][0], one.pop("penalty")
    ids = inputs.segment_ids
    return one | dict(segment_ids=None if ids is None else np.asarray(ids)[b : b + 1])


def check(inputs, *, pieces=None, seed=1):
    """Values and all cotangents, also through the returned penalty."""
    options = dict(pieces=pieces, interpret=not ON_DEVICE)
    solution, penalty, saved = penalty_solve.forward(inputs, **options)
    rng = np.random.default_rng(seed)
    d_solution, d_penalty = (rng.standard_normal(x.shape) for x in (solution, penalty))
    gradients = penalty_solve.backward(
        inputs, saved, jnp.asarray(d_solution, jnp.float32), jnp.asarray(d_penalty), **options
    )
    tolerance = tolerances.MOSAIC_SOLVE_RMS
    for b in range(len(inputs.rhs)):
        call = arguments(inputs, b)
        for name, x, y in zip(
            ("solution", "penalty"), (solution, penalty), oracle.penalty_solve(**call), strict=True
        ):
            support.assert_rms_close(x[b], y[0], tolerance, name)
        expected = oracle.penalty_solve_grad(d_solution[b : b + 1], d_penalty[b : b + 1], **call)
        for name in ("rhs", "direction", "penalty", "weight", "log_decay"):
            actual = getattr(gradients, name)
            if actual is None:
                assert getattr(inputs, name) is None
            else:
                support.assert_rms_close(actual[b], expected[name][0], tolerance, "d " + name)
        support.assert_rms_close(gradients.lambda0[b], expected["lambda0"], tolerance, "d lambda0")


def test_gates_groups_and_an_odd_length():
    check(draw(1, 100, 1, 2, 64))


def test_without_gates_in_segments_over_pieces():
    ids = np.zeros((1, 150), int)
    for start in (2, 40, 64, 149):
        ids[:, start:] += 1
    check(draw(1, 150, 1, 1, 64, gates=False, ids=ids, wide=True), pieces=3)


@pytest.mark.slow
def test_wide():
    check(draw(2, 70, 2, 1, 128))


def test_rows_of_any_size():
    """Zeros stay zeros, the smallest and largest keep their digits, NaN and infinity are told."""
    inputs = draw(1, 64, 1, 1, 64, wide=True)
    scales = np.ones(64)
    scales[:6] = 0, 1e-25, 1e-36, 1e35, np.nan, np.inf
    rhs = inputs.rhs * jnp.asarray(scales, jnp.float32)[:, None, None]
    solve = lambda rhs: penalty_solve.forward(  # noqa: E731
        inputs._replace(rhs=rhs), interpret=not ON_DEVICE
    )[0]
    usual, scaled = np.asarray(solve(inputs.rhs)), np.asarray(solve(rhs))
    assert not scaled[:, 0].any()
    assert np.isnan(scaled[:, 4:6]).all()
    for t in (1, 2, 3):
        expected = wide(usual[:, t]) * scales[t]
        support.assert_rms_close(wide(scaled[:, t]), expected, tolerances.MOSAIC_SOLVE_RMS)
    np.testing.assert_array_equal(scaled[:, 6:], usual[:, 6:])


def lowered(dim, groups, *, gates, wide):
    inputs = jax.eval_shape(lambda: draw(2, 256, 2, groups, dim, gates=gates, wide=wide))

    def both(inputs):
        solution, penalty, saved = penalty_solve.forward(inputs)
        return penalty_solve.backward(inputs, saved, solution, penalty)

    return jax.jit(both).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dim", "groups", "gates"), [(64, 1, True), (128, 2, True), (64, 1, False)]
)
def test_lowers_for_cuda_without_a_gpu(dim, groups, gates):
    if jax.__version_info__ < backend.FIRST_JAX:
        with pytest.raises(NotImplementedError, match=r"need jax 0\.11 or later"):
            lowered(dim, groups, gates=gates, wide=gates)
        return
    text = lowered(dim, groups, gates=gates, wide=gates)
    for kernel in ("sweep", "solve"):
        assert "vla_hopper_penalty_" + kernel in text
    with jax.enable_x64(True):
        assert "vla_hopper_penalty_solve" in lowered(dim, groups, gates=gates, wide=gates)
