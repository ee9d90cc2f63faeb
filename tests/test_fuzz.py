"""Random data against the oracle: shapes fixed (they compile once), everything else drawn."""

import hypothesis
import numpy as np
import tolerances
from hypothesis import strategies as st
from support import (
    assert_close,
    chunks,
    draw_cotangents,
    oracle_value_and_gradients,
    split_call,
    value_and_pullback,
)

from benchmarks.cases import Case, draw

SHAPE = Case(2, 13, 1, 2, 4, 3, initial=True)

KNOBS = {
    "seed": st.integers(0, 2**16),
    "log_lambda0": st.floats(-2, 8),
    "correlation": st.sampled_from([0.0, 0.9, 0.999]),
    "key_scale": st.integers(-6, 6),
    "value_scale": st.integers(-6, 6),
    "direction_scale": st.floats(-3, 0),
    "repeated_direction": st.booleans(),
    "fresh": st.booleans(),
    "zeros": st.floats(0, 1),
    "boundaries": st.floats(0, 1),
    "padding": st.floats(0, 1),
}


def build(knobs):
    """A call that is hard in the drawn ways: scale, correlation, repeats, zeros, boundaries."""
    call, rng = draw(SHAPE, knobs["seed"]), np.random.default_rng(knobs["seed"])

    def chosen(name):
        return rng.random((2, SHAPE.length)) < knobs[name]

    correlation, key_scale = knobs["correlation"], 10.0 ** knobs["key_scale"]
    value_scale = 10.0 ** knobs["value_scale"]
    key = correlation * call["key"][:, :1] + (1 - correlation) * call["key"]
    direction = call["direction"] * 10.0 ** knobs["direction_scale"]
    if knobs["repeated_direction"]:
        direction = np.broadcast_to(direction[:, :1], direction.shape)
    memory, penalty, key_sum = (0 * x if knobs["fresh"] else x for x in call["initial_state"])
    return {
        "query": call["query"],
        "key": key * key_scale * ~chosen("zeros")[:, :, None, None],
        "value": call["value"] * value_scale,
        "direction": direction * ~chosen("zeros")[:, :, None, None],
        "lambda0": np.full(1, 10.0 ** knobs["log_lambda0"]),
        "initial_state": (memory * value_scale, penalty, key_sum * key_scale),
        "segment_ids": np.cumsum(chosen("boundaries"), axis=1, dtype=np.int32),
        "mask": ~chosen("padding"),
    }


@hypothesis.given(knobs=st.fixed_dictionaries(KNOBS))
def test_attention_equals_the_oracle(implementation, x64, knobs):
    call = build(knobs)
    cotangents = draw_cotangents(call)
    run = value_and_pullback(**chunks(implementation, 5))
    (out, state), gradients = run(*split_call(call), cotangents)
    (wanted, wanted_state), wanted_gradients = oracle_value_and_gradients(call, cotangents)
    assert_close(out, wanted, tolerances.FUZZ64, "out")
    for x, y in zip(state, wanted_state, strict=True):
        assert_close(x, y, tolerances.FUZZ64, "state")
    # Gradients may cancel to nothing (alpha_hat does not depend on the length of alpha, nor the
    # ratio on that of q): they are compared at least with the size of what cancels.
    size = sum(
        np.abs(wanted_gradients[n]).max() * np.abs(x).max()
        for n, x in (("value", call["value"]), ("memory", call["initial_state"][0]))
    )
    penalty = size / call["lambda0"][0]
    floor = {"lambda0": penalty, "penalty": penalty}
    floor["direction"] = penalty * np.abs(call["direction"]).max()
    for name in ("query", "key"):
        floor[name] = size / max(np.abs(call[name]).max(), 1e-30)
    floor["key_sum"] = floor["key"]
    for name, x in gradients.items():
        assert_close(x, wanted_gradients[name], tolerances.FUZZ64, name, floor.get(name, 0))
