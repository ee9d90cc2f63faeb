"""``implementation="reference"``: the recurrence token by token, in one arithmetic.

``published`` is the recurrence as it is printed, ``gated`` the one with weights and decay.
Everything here is differentiable by JAX in any mode and to any order, and none of it is fast. The
equation numbers are those of ``docs/derivation.md``.
"""

from vla_jax import bundles
from vla_jax.bundles import Attention, Bundle, Delta, Solve
from vla_jax.implementations import Rule
from vla_jax.reference import gated, published


def _rule(name: str) -> Rule:
    def forward(plan, inputs):
        return getattr(gated if bundles.needs_gates(inputs) else published, name)(plan, inputs)

    return Rule(forward)


RULES = {
    Solve: _rule("penalty_solve"),
    Delta: _rule("delta_rule"),
    Attention: Rule(published.attention),
}


def unsupported(bundle: Bundle, chunk_size: int | None) -> None:
    """None: every dtype, size and device is served; a ``chunk_size`` has no meaning here."""
