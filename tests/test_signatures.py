"""Public functions that take the same arguments take them alike; bundles, plans and axes agree."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

import vla_jax
from vla_jax import bundles, diagnostics, plan, sharding

WHOLE = vla_jax.vla_attention
OF_A_SEQUENCE = ("initial_state", "segment_ids", "mask", "chunk_size", "precision", "return_state")


def parameters(function):
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "of_its_own", "left_out"),
    [
        (sharding.context_parallel_attention, ("axis_name",), ()),
        (
            sharding.sharded_attention,
            ("mesh", "context_axis", "data_axis", "model_axis"),
            (),
        ),
        (vla_jax.vla_step, ("state",), OF_A_SEQUENCE),
        (
            diagnostics.state_norm,
            (),
            (
                *("query", "beta", "log_decay", "inverse", "readout", "eps"),
                *("chunk_size", "precision", "return_state"),
            ),
        ),
        (vla_jax.penalty_solve, ("rhs", "weight", "initial_penalty"), None),
        (vla_jax.delta_rule, ("write_key", "initial_memory"), None),
    ],
)
def test_arguments_are_those_of_vla_attention(function, of_its_own, left_out):
    whole, mine = parameters(WHOLE), parameters(function)
    shared = [name for name in mine if name not in of_its_own]
    if left_out is not None:
        assert shared == [name for name in whole if name not in left_out]
    for name in shared:
        assert name in whole, name
        if function is vla_jax.vla_step and name in ("direction", "implementation"):
            continue  # a step's direction has no default, and it has fewer implementations
        if name in ("lambda0", "direction") and mine[name].default is inspect.Parameter.empty:
            continue  # a primitive has no default for what it is about
        assert mine[name].default == whole[name].default, name
        assert mine[name].annotation == whole[name].annotation, name


def test_every_array_of_a_bundle_has_axes():
    outputs = (bundles.SolveOutputs, bundles.DeltaOutputs, bundles.AttentionOutputs)
    for kind in (*bundles.OPERATIONS, *outputs):
        missing = set(kind._fields) - set(bundles.AXES) - {"state"}
        assert not missing, (kind.__name__, missing)
    for kind, names in bundles.ARITHMETIC.items():
        assert set(names) <= set(kind._fields)
    assert {f.name for f in dataclasses.fields(vla_jax.VLAState)} <= set(bundles.AXES)


def test_the_documentation_gives_the_axes_of_the_table():
    """Where a docstring gives an argument axes, they are those that the checks use."""
    seen = 0
    for function in (WHOLE, vla_jax.penalty_solve, vla_jax.delta_rule):
        text = inspect.getdoc(function)
        for names, axes in re.findall(r"^  ([a-z0-9_, ]+): ``\[([^\]]+)\]``", text, re.MULTILINE):
            for name in names.split(", "):
                table = bundles.AXES[name.removeprefix("initial_")]
                assert axes.replace(",", "") == table, (function.__name__, name)
                seen += 1
    assert seen >= 12


def test_the_variant_defaults_are_the_public_ones():
    public = {f.name: parameters(WHOLE)[f.name].default for f in dataclasses.fields(plan.Variant)}
    assert plan.variant(**public, dtype=jnp.float32) == plan.Variant()


def test_every_size_of_a_bundle_is_checked():
    """A wrong axis in any array is refused, with the axes of the table and both sizes."""
    x = {
        "query": (2, 3, 4, 5), "key": (2, 3, 2, 5), "value": (2, 3, 2, 6), "direction": (2, 3, 2, 5)
    }  # fmt: skip
    arrays = {name: jnp.ones(shape) for name, shape in x.items()}
    for name, shape in x.items():
        for axis, letter in enumerate(bundles.AXES[name].split()):
            if letter in ("E", "Hq") or name == "key":
                continue
            wrong = list(shape)
            wrong[axis] += 1
            with pytest.raises(ValueError, match=rf"{name} must have shape \[") as error:
                WHOLE(**{**arrays, name: jnp.ones(wrong)})
            assert str(wrong) in str(error.value)
            assert bundles.AXES[name].replace(" ", ", ") in str(error.value)


def test_a_state_is_sharded_as_the_table_says():
    specs = plan.partition_specs(B="data", T="context", H="model")
    assert specs["query"] == specs["key"] == jax.P("data", "context", "model", None)
    assert specs["memory"] == jax.P("data", "model", None, None)
    assert specs["mask"] == jax.P("data", "context")
    assert plan.partition_specs(T="context")["value"] == jax.P(None, "context", None, None)
