"""``implementation="xla"``: both primitives in matrix products over chunks of tokens.

``solve`` and ``delta_rule`` hold a forward and a closed-form backward each, ``gated_solve`` and
``gated_delta`` those with weights and decay, ``unresolved`` the λ₀ that float32 does not resolve.
Equation numbers are those of ``docs/derivation.md``. Nothing of size T×T or T×D×D is ever made, no
factorisation is differentiated or made twice, and the backward keeps the inputs and what each
forward says that it saves.

An array of tokens in chunks is chunk-major here, ``[N, B, H, C, D]`` (see ``chunks``), and the
memory is ``Sᵀ`` (``[B, H, D, E]``), so a state acts from the left.
"""

from vla_jax import decay
from vla_jax.bundles import Bundle, Delta, Solve
from vla_jax.chunks import SUPER_CHUNK, Scans, running_sum, sweep
from vla_jax.chunkwise import delta_rule, gated_delta, gated_solve, solve
from vla_jax.implementations import Rule, gated_or_not


def rules(scans: Scans) -> dict[type, Rule]:
    """The rules, with these scans over chunks."""
    return {
        Solve: gated_or_not(gated_solve, solve, scans=scans),
        Delta: gated_or_not(gated_delta, delta_rule, scans=scans),
    }


RULES = rules(Scans(sweep, running_sum, decay.running_sum, SUPER_CHUNK))


def unsupported(bundle: Bundle, chunk_size: int | None) -> None:
    """None: every dtype, size and device is served."""
