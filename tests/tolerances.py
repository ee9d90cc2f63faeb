"""Every tolerance of the suite, once, with its reason.

All are relative to the largest entry of the expected array (see `support.assert_close`), because
rounding in a matrix product is proportional to its largest terms: small entries beside large ones
carry the error of the large ones.
"""

# float64 against the oracle, values and gradients. Rounding is 1e-16; cond(M) of the cases is at
# most 1e3 and sums have up to 1e3 terms.
FLOAT64 = 1e-10

# float32 against the float64 oracle, T = 4096 and cond(M) up to 1e3. The prefix of the penalty
# rounds at 6e-8 * sqrt(T) and is amplified by cond(M); 7e-6 was measured at cond(M) = 215.
FLOAT32 = 1e-4

# Gradients of the same: two solves and two sweeps instead of one.
FLOAT32_GRADIENT = 4e-4

# float32, short sequences (T <= 100), the same mathematics in another order.
REORDERED32 = 2e-5

# bfloat16 operands: relative root mean square, not the largest entry. One rounding is 2^-9 = 2e-3;
# the write vector, the residual and the output are each rounded.
BFLOAT16_RMS = 2e-2

# The kernels' error in bfloat16 over that of "xla", at most: both round the operands alone.
AGAINST_XLA = 1.5

# Equal keys, written 1000 times: each write is off by the rounding of A k, where the largest
# eigenvalue of A is 150 times that of k. Multiplies the tolerance of the dtype.
EQUAL_KEYS = 10

# A decoding kernel in float32 against the oracle: 22 steps, root mean square.
DECODE32 = 1e-5

# 1e5 decode steps in float32 with one repeated direction, which is the worst case of the
# Sherman-Morrison drift (7e-2 without re-inversion).
DECODE_DRIFT = 1e-3

# lambda0 = 1e8: alpha differs from k / lambda0 by a relative (u.u T) / lambda0 < 1e-6.
HUGE_LAMBDA0 = 1e-5

# Hypothesis in float64: lambda0 down to 1e-2 with nearly equal keys, scales over twelve decades.
FUZZ64 = 1e-8

# Gradients where lambda0 no longer regularises: M of the first D tokens has cond(M) up to 1e4, and
# a gradient its square. 2e-3 was measured, NaN or 1e7 before the lost tokens were solved again.
SMALL_LAMBDA0_GRADIENT = 5e-3

# float32 with gates, values and gradients, by λ₀ over the longest β‖u‖² (1e3: λ₀ itself). A
# residual of 3e-6 is an error of up to as much over that share; 1e-5 and 6e-5 were measured at .1
# and .01, D = 5. Of the read-out's ratio the derivative by the decay is left out: numerator and key
# sum decay alike, and where they cancel (1e-4 of terms of 1) its relative error is 5e-3.
GATED32 = {1e3: 5e-5, 0.1: 5e-5, 0.01: 1e-3}
# The solve's kernels with 16-bit directions, root mean square: rows end at a residual of 3e-4,
# which 1 / lambda0 amplifies, and products of the backward round to tf32 and bfloat16.
MOSAIC_SOLVE_RMS = 5e-3
