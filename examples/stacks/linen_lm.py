"""A language model of one's own in Flax Linen, with this memory in the place of attention.

    python examples/stacks/linen_lm.py --steps=20 --out_dir=DIR

Packed rows from Grain, layers in ``linen.scan`` with ``linen.remat``, bfloat16, optax in a jitted
step, Orbax checkpoints; the same command goes on from the last one.
"""

from __future__ import annotations

import pathlib
import time

import grain
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from absl import app, flags, logging
from flax import linen
from flax.training import train_state
from packed_text import VOCAB_SIZE, batches

import vla_jax.linen
from vla_jax.presets import PRESETS

_PRESET = flags.DEFINE_enum("preset", "recall", list(PRESETS), "Options of the memory.")
_WIDTH = flags.DEFINE_integer("width", 64, "Of the model.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 2, "Of each layer.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 4, "In all.", lower_bound=1)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 128, "Tokens of a row.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Of AdamW.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 100, "Of the optimiser, in all.", lower_bound=1)
_OUT_DIR = flags.DEFINE_string("out_dir", "runs/linen_lm", "Of the checkpoints.")

DTYPE = jnp.bfloat16


class Block(linen.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    @linen.compact
    def __call__(self, x, segment_ids):
        width = x.shape[-1]
        attention = vla_jax.linen.SelfAttention(_HEADS.value, preset=_PRESET.value, dtype=DTYPE)
        y = linen.RMSNorm(dtype=DTYPE)(x)
        x = x + attention(y, segment_ids=segment_ids)
        y = linen.gelu(linen.Dense(4 * width, dtype=DTYPE)(linen.RMSNorm(dtype=DTYPE)(x)))
        return x + linen.Dense(width, dtype=DTYPE)(y), None


class Model(linen.Module):
    """Bytes in, logits of the next byte out."""

    @linen.compact
    def __call__(self, tokens, segment_ids):
        embed = linen.Embed(VOCAB_SIZE, _WIDTH.value, dtype=DTYPE)
        blocks = linen.scan(
            linen.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=linen.broadcast,
            length=_LAYERS.value,
        )
        x, _ = blocks()(embed(tokens), segment_ids)
        return embed.attend(linen.RMSNorm(dtype=DTYPE)(x)).astype(jnp.float32)


def loss_of(params, batch):
    """Mean cross-entropy in nats of the tokens that follow one of their own document."""
    tokens, ids = batch["tokens"], batch["tokens_segment_ids"]
    counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    logits = Model().apply({"params": params}, tokens[:, :-1], ids[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return (losses * counts).sum() / counts.sum()


@jax.jit
def create():
    """The state of training: parameters and that of the optimiser."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Model().init(jax.random.key(0), tokens, tokens)["params"]
    return train_state.TrainState.create(
        apply_fn=None, params=params, tx=optax.adamw(_LEARNING_RATE.value)
    )


@jax.jit
def train_step(state, batch):
    """One step of the optimiser; returns the loss before it as well."""
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def main(_):
    """Trains, from the last checkpoint if there is one."""
    logging.set_verbosity(logging.WARNING)  # Orbax is talkative
    began = time.perf_counter()
    state = create()
    data = batches(_BATCH_SIZE.value, _SEQ_LEN.value)
    with ocp.CheckpointManager(pathlib.Path(_OUT_DIR.value).absolute()) as manager:
        done = manager.latest_step() or 0
        if done:
            restore = ocp.args.StandardRestore(state), grain.checkpoint.CheckpointRestore(data)
            kept = manager.restore(done, args=ocp.args.Composite(state=restore[0], data=restore[1]))
            state = kept["state"]
        for step in range(done + 1, _STEPS.value + 1):
            state, loss = train_step(state, next(data))
            if step in (done + 1, _STEPS.value) or step % 20 == 0:
                seconds = time.perf_counter() - began
                print(f"step {step}: loss {loss:.3f} nats per byte, {seconds:.1f} s", flush=True)
        if done < _STEPS.value:
            save = ocp.args.StandardSave(state), grain.checkpoint.CheckpointSave(data)
            manager.save(_STEPS.value, args=ocp.args.Composite(state=save[0], data=save[1]))


if __name__ == "__main__":
    app.run(main)
