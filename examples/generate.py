"""Continues a text with a model that ``train_lm.py`` has trained, printing it as it is produced.

    python examples/generate.py --run=runs/lm --prompt="def main("

The prompt is read at once and the text decoded in one compiled loop. ``--session=FILE`` keeps where
the text stands, after every ``--chunk`` bytes. If the file is there, the text goes on from it: with
what it would have drawn next, or with ``--prompt`` if one is given. Killed at any time, the same
command without ``--prompt`` goes on; at most the chunk under way is written again.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from commands import check_arguments, replaceable, said
from jax.tree_util import Partial
from lm import describe, functions
from model import Model
from training import load_model

from vla_jax import generation, serialization

_RUN = flags.DEFINE_string("run", "runs/lm", "Directory of a run of train_lm.py.")
_PROMPT = flags.DEFINE_multi_string(
    "prompt", ["def "], "What to continue; again for more texts at once."
)
_MAX_NEW = flags.DEFINE_integer("max_new", 400, "Bytes to produce at most.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 for the likeliest byte.", lower_bound=0)
_TOP_K = flags.DEFINE_integer("top_k", None, "Draw from so many bytes.", lower_bound=1)
_TOP_P = flags.DEFINE_float("top_p", 0.95, "Draw from so much probability.", 1e-6, 1.0)
_STOP = flags.DEFINE_list("stop", ["0"], "Numbers of the bytes that end a text.")
_CHUNK = flags.DEFINE_integer("chunk", 16, "Bytes printed at a time.", lower_bound=1)
_SESSION = flags.DEFINE_string("session", None, "File to go on from and to save to; one prompt.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws of a new text.", lower_bound=0)


def main(argv: list[str]) -> None:
    """Generates."""
    check_arguments("generate", argv)
    try:
        _generate()
    except (ValueError, OSError) as error:
        sys.exit(f"generate: {said(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def _fresh(model: Model, batch: int) -> dict[str, Any]:
    """Where texts stand that have not begun: what a session file holds."""
    return {
        "state": model.init_state(batch),
        "logits": jnp.zeros((batch, model.tokens.num_embeddings), jnp.float32),
        "key": jax.random.key_data(jax.random.key(_SEED.value)),
        "drawn": jnp.zeros(1, jnp.int32),
    }


def _generate() -> None:
    if not all(byte.isdecimal() and int(byte) < 256 for byte in filter(None, _STOP.value)):
        raise ValueError(f"--stop must be numbers from 0 to 255, got {','.join(_STOP.value)}")
    shown = _PROMPT.value
    path = None if _SESSION.value is None else replaceable(_SESSION.value, "session")
    if path is not None and len(shown) > 1:
        raise ValueError("--session takes one --prompt")
    model, config = load_model(_RUN.value)
    at = _fresh(model, len(shown))
    prompts = [b"\0" + os.fsencode(prompt) for prompt in shown]  # the start of a document
    if path is not None and path.exists():
        at = serialization.load(path, at)
        if not flags.FLAGS["prompt"].present:
            shown = [""]
        prompts = [os.fsencode(prompt) for prompt in shown]
    key, drawn = jax.random.wrap_key_data(at["key"]), int(at["drawn"][0])
    prefill, step = functions(model)
    if any(prompts):
        ids, mask = generation.left_pad(prompts)
        begin = Partial(prefill, at["state"])
    else:  # nothing to read
        ids, mask = jnp.zeros((len(prompts), 1), jnp.int32), None
        begin = Partial(lambda logits, state, ids, mask: (logits, state), at["logits"], at["state"])
    read = 0 if mask is None else ids.shape[1]
    longest = int(jnp.max(at["state"].position)) + read + _MAX_NEW.value
    if config.capacity is not None and longest > config.capacity:
        raise ValueError(
            f"the model can keep {config.capacity} bytes of a text, asked for {longest}"
        )

    chunks = generation.stream(
        begin,
        step,
        ids,
        mask,
        max_new=_MAX_NEW.value,
        chunk=_CHUNK.value,
        key=key,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        stop=[int(byte) for byte in _STOP.value if byte],
        drawn=drawn,
    )
    written = [b"" for _ in prompts]
    if len(prompts) == 1:
        _write(os.fsencode(shown[0]))
    produced, timed, start = 0, 0, time.perf_counter()
    for i, chunk in enumerate(chunks):
        for row, (tokens, length) in enumerate(zip(chunk.tokens, chunk.lengths, strict=True)):
            new = bytes(tokens[: int(length)].tolist()).removesuffix(b"\0")
            if len(prompts) == 1:
                _write(new)
            else:
                written[row] += new
        count = int(jnp.sum(chunk.lengths))
        produced += count
        if i == 0:
            start = time.perf_counter()  # the first chunk compiles
        else:
            timed += count
        if path is not None:  # whole at any time: a kill loses at most the chunk in flight
            drawn += int(jnp.max(chunk.lengths))
            now = {"state": chunk.state, "logits": chunk.logits}
            serialization.save(path, {**at, **now, "drawn": jnp.full(1, drawn, jnp.int32)})
    seconds = time.perf_counter() - start
    if len(prompts) > 1:
        for prompt, text in zip(shown, written, strict=True):
            _write(b"--- " + os.fsencode(prompt) + text + b"\n")
    speed = (
        f"{timed / seconds:,.0f} bytes per second after the first {_CHUNK.value}, " if timed else ""
    )
    print(f"\n{produced} bytes, {speed}{describe(model, config, chunk.state)}", file=sys.stderr)


def _write(text: bytes) -> None:
    """Bytes as they are: a character may be cut between two chunks."""
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    app.run(main)
