"""Continues a text with a model that ``train_lm.py`` has trained, printing it as it is produced.

    python examples/generate.py --run=runs/lm --prompt="def main("

The prompt is read at once and the text decoded in one compiled loop. ``--session=FILE`` goes on
from the file if it is there, and keeps there what has been read and written.
"""

from __future__ import annotations

import codecs
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from jax.tree_util import Partial
from lm import describe, functions
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
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.", lower_bound=0)


def main(argv: list[str]) -> None:
    """Generates."""
    if len(argv) > 1:
        sys.exit(f"generate: unexpected argument {argv[1]!r}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        _generate()
    except ValueError as error:
        sys.exit(f"generate: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _generate() -> None:
    prompts = [prompt.encode() for prompt in _PROMPT.value]
    model, config = load_model(_RUN.value)
    state, session = model.init_state(len(prompts)), _SESSION.value
    if session is not None and len(prompts) > 1:
        raise ValueError("--session takes one --prompt")
    if session is not None and pathlib.Path(session).exists():
        state = serialization.load(session, state)
    else:
        prompts = [b"\0" + prompt for prompt in prompts]  # the start of a document
    ids, mask = generation.left_pad(prompts)
    longest = int(jnp.max(state.position)) + ids.shape[1] + _MAX_NEW.value
    if config.capacity is not None and longest > config.capacity:
        raise ValueError(
            f"the model can keep {config.capacity} bytes of a text, asked for {longest}"
        )

    prefill, step = functions(model)
    chunks = generation.stream(
        Partial(prefill, state),
        step,
        ids,
        mask,
        max_new=_MAX_NEW.value,
        chunk=_CHUNK.value,
        key=jax.random.key(_SEED.value),
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        stop=[int(byte) for byte in _STOP.value],
    )
    texts = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    written = ["" for _ in prompts]
    if len(prompts) == 1:
        print(_PROMPT.value[0], end="", flush=True)
    produced, timed, start = 0, 0, time.perf_counter()
    for i, chunk in enumerate(chunks):
        for row, (tokens, length) in enumerate(zip(chunk.tokens, chunk.lengths, strict=True)):
            new = bytes(tokens[: int(length)].tolist())
            text = texts[row].decode(new.removesuffix(b"\0"))
            written[row] += text if len(prompts) > 1 else ""
            if len(prompts) == 1:
                print(text, end="", flush=True)
        count = int(jnp.sum(chunk.lengths))
        produced += count
        if i == 0:
            start = time.perf_counter()  # the first chunk compiles
        else:
            timed += count
        if session is not None:  # whole at any time: a kill loses at most the chunk in flight
            serialization.save(session, chunk.state)
    seconds = time.perf_counter() - start
    for prompt, text in zip(_PROMPT.value, written, strict=True):
        if len(prompts) > 1:
            print(f"--- {prompt}{text}")
    speed = (
        f"{timed / seconds:,.0f} bytes per second after the first {_CHUNK.value}, " if timed else ""
    )
    print(f"\n{produced} bytes, {speed}{describe(chunk.state)}", file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
