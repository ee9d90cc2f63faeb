"""Times decoding at different lengths of context: a constant state beside a cache that grows.

    python examples/latency.py --models=vla,softmax --contexts=1024,32768,524288

The models have random parameters and the sizes of ``--preset`` of ``train_lm.py``, and every
sequence is as if ``context`` bytes had been read: softmax layers have a full cache of that many
(random) keys and values, and read all of it for each byte. What is timed is one compiled loop of
``--steps`` bytes, each the likeliest after the one before; the median of ``--repeats``. Prints a
line of JSON for each model and context: milliseconds a byte, bytes a second over the batch, and
bytes of state a sequence; ``--append=FILE`` adds them to a file. A cache that does not fit is
reported as such.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from commands import append, check_arguments, output, said
from flax import nnx
from lm import PRESETS
from model import MIXERS, Model, ModelConfig, parameter_count, with_parameter_count

import vla_jax
from vla_jax import serialization

_PRESET = flags.DEFINE_enum("preset", "h200", sorted(PRESETS), "Sizes of the model.")
_MODELS = flags.DEFINE_list("models", ["vla", "softmax"], f"Each of {', '.join(MIXERS)}.")
_CONTEXTS = flags.DEFINE_list("contexts", ["1024", "32768", "524288"], "Bytes read before.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Sequences at once.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 128, "Bytes of a timed loop.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed loops.", lower_bound=1)
_APPEND = flags.DEFINE_string("append", None, "A file to which the lines are added.")


@functools.partial(jax.jit, static_argnames=("graphdef", "steps"), donate_argnames="state")
def _decode(graphdef, params, token, state, steps):
    model = nnx.merge(graphdef, params)

    def step(_, carry):
        token, state = carry
        logits, state = model.step(token, state)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), state

    return jax.lax.fori_loop(0, steps, step, (token, state))


def _after(model: Model, batch: int, context: int) -> Any:
    """A state as it is after ``context`` tokens: a cache is full of random numbers."""
    state = model.init_state(batch)
    layers = []
    for i, layer in enumerate(state.layers):
        if hasattr(layer, "count"):
            keys = jax.random.split(jax.random.key(i))
            random = [jax.random.normal(key, layer.key.shape, layer.key.dtype) for key in keys]
            count = jnp.full_like(layer.count, context)
            layer = dataclasses.replace(layer, key=random[0], value=random[1], count=count)
        layers.append(jax.tree.map(jnp.array, layer))  # nothing shared: all of it is donated
    position = jnp.full_like(state.position, context)
    return dataclasses.replace(state, layers=tuple(layers), position=position)


def measure(
    config: ModelConfig, batch: int, context: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Times decoding after ``context`` tokens.

    Returns:
      ``milliseconds_per_byte`` and ``bytes_per_second``, medians over ``repeats`` of the loop, and
      ``state_bytes`` a sequence.
    """
    config = dataclasses.replace(config, window=context + (repeats + 1) * steps)
    model = Model(config, nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    state, token = _after(model, batch, context), jnp.zeros(batch, jnp.int32)
    size = serialization.nbytes(state) // batch
    seconds = []
    for _ in range(repeats + 1):  # the first compiles
        start = time.perf_counter()
        token, state = _decode(graphdef, params, token, state, steps)
        jax.block_until_ready((token, state))
        seconds.append(time.perf_counter() - start)
    each = statistics.median(seconds[1:]) / steps
    return {
        "milliseconds_per_byte": round(each * 1e3, 4),
        "bytes_per_second": round(batch / each, 1),
        "state_bytes": size,
    }


def main(argv: list[str]) -> None:
    """Measures every model at every context."""
    check_arguments("latency", argv)
    for text in _CONTEXTS.value:
        if not text.isdecimal() or not int(text):
            sys.exit(f"latency: --contexts must be positive whole numbers, got {text!r}")
    base = PRESETS[_PRESET.value]
    configs = {}
    try:
        if _APPEND.value is not None:
            output(_APPEND.value, "append")
        for mixer in _MODELS.value:
            config = dataclasses.replace(base, mixer=mixer)
            configs[mixer] = with_parameter_count(config, parameter_count(base))
    except ValueError as error:
        sys.exit(f"latency: {error}")
    for mixer, config in configs.items():
        for context in map(int, _CONTEXTS.value):
            line = {
                "model": mixer,
                "context": context,
                "batch_size": _BATCH_SIZE.value,
                "parameters": parameter_count(config),
            }
            try:
                line |= measure(config, _BATCH_SIZE.value, context, _STEPS.value, _REPEATS.value)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                line["error"] = "out of memory"
            line |= {
                "dtype": config.dtype or "float32",
                "preset": _PRESET.value,
                "steps": _STEPS.value,
                "device": jax.devices()[0].device_kind,
                "versions": {"jax": jax.__version__, "vla_jax": vla_jax.__version__},
            }
            print(json.dumps(line), flush=True)
            if _APPEND.value is not None:
                try:
                    append(_APPEND.value, line)
                except OSError as error:
                    sys.exit(f"latency: {said(error)}")


if __name__ == "__main__":
    app.run(main)
