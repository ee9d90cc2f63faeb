"""The implementations by name: where each lives, whether it can serve, and which one is best.

An implementation is a module with two names. ``RULES`` maps the type of a bundle to a ``Rule``; a
primitive that it lacks is composed of those that it has. ``unsupported(bundle, chunk_size)`` is the
reason why the implementation cannot serve these arrays here, or None. Modules are imported when
they are asked for: some need packages that others do without.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from vla_jax import bundles, validation

MODULES = {
    "reference": "vla_jax.reference",
    "xla": "vla_jax.chunkwise",
    "associative": "vla_jax.associative",
    "pallas": "vla_jax.pallas",
    "triton": "vla_jax.triton",
}
NAMES = tuple(MODULES)
BEST = ("pallas", "xla")  # what ``implementation=None`` tries, in this order
STEPS = ("xla", "pallas")  # those of a decoding step
# Those that have weights, decay and the inverse at the read always. Another that has them for some
# arrays says by ``unsupported_gates`` why not.
GATED = ("reference", "xla", "associative")


class Rule(NamedTuple):
    """How an implementation computes one primitive.

    Attributes:
      forward: ``(plan, inputs) -> (outputs, saved)``.
      backward: ``(plan, inputs, saved, cotangents) -> cotangents of the inputs``, a bundle of the
        inputs' type; that of ``segment_ids`` is not read. None if JAX differentiates ``forward``.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None


def gated_or_not(gated: Any, plain: Any, **options: Any) -> Rule:
    """The rule of two modules with ``forward`` and ``backward``: with gates that of ``gated``."""

    def call(name):
        def chosen(plan, inputs, *saved):
            of = gated if bundles.needs_gates(inputs) else plain
            return getattr(of, name)(plan, inputs, *saved, **options)

        return chosen

    return Rule(call("forward"), call("backward"))


def module(name: str) -> Any:
    """The module of an implementation."""
    return importlib.import_module(MODULES[name])


def choose(
    name: Any,
    bundle: Any,
    chunk_size: int | None,
    inverse: str = "write",
    precision: Any = None,
) -> str:
    """The implementation for these arrays: the one named or, for None, the first that serves.

    Raises:
      ValueError: if there is none of that name.
      NotImplementedError: if the one named cannot serve, with every reason.
    """
    if name is None:
        return next(
            n for n in BEST if _passed_over(n, bundle, chunk_size, inverse, precision) is None
        )
    validation.choice("implementation", name, NAMES)
    reason = _unsupported(name, bundle, chunk_size, inverse, precision)
    if reason is not None:
        operation = bundles.OPERATIONS[type(bundle)]
        raise NotImplementedError(f"implementation={name!r} cannot serve {operation}: {reason}")
    return name


def choose_step(name: Any, step: Any, inverse: str) -> str:
    """The implementation of one decoding step: ``"xla"``, or the kernel where it is named.

    Raises:
      ValueError: if ``name`` is none that a step has.
      NotImplementedError: if the kernel cannot serve these arrays here.
    """
    if name is None:
        return "xla"
    validation.choice("implementation", name, STEPS)
    return choose(name, step, None, inverse)


def _unsupported(
    name: str, bundle: Any, chunk_size: int | None, inverse: str, precision: Any
) -> str | None:
    reason = None if name in GATED else bundles.ungated(bundle, inverse)
    if reason is None:
        return module(name).unsupported(bundle, chunk_size)
    gates = getattr(module(name), "unsupported_gates", None)
    return reason if gates is None else gates(bundle, chunk_size, precision, inverse)


def _passed_over(
    name: str, bundle: Any, chunk_size: int | None, inverse: str, precision: Any
) -> str | None:
    """Why ``implementation=None`` is not this one; None if it may be."""
    if name == "pallas":
        if chunk_size is not None:
            return "the kernels have no chunk_size"
        reason = not_on_gpus(list(bundles.tokens(bundle).values()))
        if reason is not None:
            return reason
    return _unsupported(name, bundle, chunk_size, inverse, precision)


def not_on_gpus(arrays: list[Any]) -> str | None:
    """Why the kernels may not get these arrays; None if a program of them is for GPUs.

    JAX's default device must be a GPU, and so the devices of arrays that are concrete.
    """
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}"
    default = getattr(jax.config, "jax_default_device", None)
    if default is not None and getattr(default, "platform", default) not in ("gpu", "cuda"):
        return f"the default device is {default}"
    concrete = [x for x in arrays if not isinstance(x, jax.core.Tracer)]
    if any(device.platform != "gpu" for x in concrete for device in x.devices()):
        return "an array is not on a GPU"
    return None
