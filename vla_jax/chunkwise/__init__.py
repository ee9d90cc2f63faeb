"""``implementation="xla"``: both primitives in matrix products over chunks of tokens.

``solve`` and ``delta_rule`` hold a forward and a closed-form backward each, ``unresolved`` the λ₀
that float32 does not resolve. Equation numbers are those of ``docs/derivation.md``. Nothing of size
T×T or T×D×D is ever made, no factorisation is differentiated or made twice, and the backward keeps
the inputs and what ``Solved`` and ``Swept`` hold.

An array of tokens in chunks is chunk-major here, ``[N, B, H, C, D]`` (see ``chunks``), and the
memory is ``Sᵀ`` (``[B, H, D, E]``), so a state acts from the left.
"""

from vla_jax.bundles import Bundle, Delta, Solve
from vla_jax.chunkwise import delta_rule, solve
from vla_jax.implementations import Rule

RULES = {
    Solve: Rule(solve.forward, solve.backward),
    Delta: Rule(delta_rule.forward, delta_rule.backward),
}


def unsupported(bundle: Bundle, chunk_size: int | None) -> None:
    """None: every dtype, size and device is served."""
