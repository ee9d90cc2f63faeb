"""A language model of one's own in Flax NNX, with this memory in the place of attention.

    python examples/stacks/nnx_lm.py --steps=20 --out_dir=DIR

Packed rows from Grain, layers in ``nnx.scan`` with ``nnx.remat``, bfloat16, optax in a jitted step,
Orbax checkpoints; the same command goes on from the last one. ``--softmax_every=4`` makes every
fourth layer softmax attention.
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
from flax import nnx
from packed_text import VOCAB_SIZE, batches

import vla_jax.nnx
from vla_jax.presets import PRESETS

_PRESET = flags.DEFINE_enum("preset", "recall", list(PRESETS), "Options of the memory.")
_WIDTH = flags.DEFINE_integer("width", 64, "Of the model.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 2, "Of each layer.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 4, "In all.", lower_bound=1)
_SOFTMAX_EVERY = flags.DEFINE_integer("softmax_every", 0, "Layers; 0: none.", lower_bound=0)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 128, "Tokens of a row.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Of AdamW.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 100, "Of the optimiser, in all.", lower_bound=1)
_OUT_DIR = flags.DEFINE_string("out_dir", "runs/nnx_lm", "Of the checkpoints.")

DTYPE = jnp.bfloat16


class Softmax(nnx.Module):
    """Softmax attention, called as the memory is."""

    def __init__(self, num_heads: int, width: int, *, rngs: nnx.Rngs):
        self.qkv = nnx.LinearGeneral(
            width, (3, num_heads, width // num_heads), dtype=DTYPE, rngs=rngs
        )
        self.out = nnx.Linear(width, width, dtype=DTYPE, rngs=rngs)

    def __call__(self, x, *, segment_ids):
        q, k, v = jnp.unstack(self.qkv(x), axis=2)
        mask = nnx.make_attention_mask(segment_ids, segment_ids, jnp.equal, dtype=bool)
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        return self.out(out.reshape(x.shape))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, softmax: bool, rngs: nnx.Rngs):
        width = _WIDTH.value
        self.norms = nnx.List([nnx.RMSNorm(width, dtype=DTYPE, rngs=rngs) for _ in range(2)])
        if softmax:
            self.attention = Softmax(_HEADS.value, width, rngs=rngs)
        else:
            self.attention = vla_jax.nnx.SelfAttention(
                _HEADS.value, width, preset=_PRESET.value, dtype=DTYPE, rngs=rngs
            )
        self.up = nnx.Linear(width, 4 * width, dtype=DTYPE, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=DTYPE, rngs=rngs)

    def __call__(self, x, segment_ids):
        x = x + self.attention(self.norms[0](x), segment_ids=segment_ids)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Group(nnx.Module):
    """What is scanned over: one block, or as many as it takes to the next softmax layer."""

    def __init__(self, rngs: nnx.Rngs):
        size = _SOFTMAX_EVERY.value
        self.blocks = nnx.List([Block(i == size - 1, rngs) for i in range(max(size, 1))])

    def __call__(self, x, segment_ids):
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x, segment_ids)
        return x


class Model(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, rngs: nnx.Rngs):
        groups = _LAYERS.value // max(_SOFTMAX_EVERY.value, 1)
        self.embed = nnx.Embed(VOCAB_SIZE, _WIDTH.value, dtype=DTYPE, rngs=rngs)
        self.groups = nnx.vmap(Group)(rngs.split(groups))
        self.norm = nnx.RMSNorm(_WIDTH.value, dtype=DTYPE, rngs=rngs)

    def __call__(self, tokens, segment_ids):
        forward = nnx.scan(
            lambda group, x, ids: group(x, ids),
            in_axes=(0, nnx.Carry, None),
            out_axes=nnx.Carry,
        )
        x = forward(self.groups, self.embed(tokens), segment_ids)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


def loss_of(model, batch):
    """Mean cross-entropy in nats of the tokens that follow one of their own document."""
    tokens, ids = batch["tokens"], batch["tokens_segment_ids"]
    counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    logits = model(tokens[:, :-1], ids[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return (losses * counts).sum() / counts.sum()


@nnx.jit
def create():
    """The model and its optimiser."""
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(_LEARNING_RATE.value), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, batch):
    """One step of the optimiser, in place; returns the loss before it."""
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss


def main(_):
    """Trains, from the last checkpoint if there is one."""
    if _LAYERS.value % max(_SOFTMAX_EVERY.value, 1):
        raise app.UsageError("--layers must be a multiple of --softmax_every")
    logging.set_verbosity(logging.WARNING)  # Orbax is talkative
    began = time.perf_counter()
    model, optimizer = create()
    data = batches(_BATCH_SIZE.value, _SEQ_LEN.value)
    with ocp.CheckpointManager(pathlib.Path(_OUT_DIR.value).absolute()) as manager:
        done = manager.latest_step() or 0
        state = nnx.to_pure_dict(nnx.state((model, optimizer)))
        if done:
            restore = ocp.args.StandardRestore(state), grain.checkpoint.CheckpointRestore(data)
            kept = manager.restore(done, args=ocp.args.Composite(state=restore[0], data=restore[1]))
            nnx.update((model, optimizer), kept["state"])
        for step in range(done + 1, _STEPS.value + 1):
            loss = train_step(model, optimizer, next(data))
            if step in (done + 1, _STEPS.value) or step % 20 == 0:
                seconds = time.perf_counter() - began
                print(f"step {step}: loss {loss:.3f} nats per byte, {seconds:.1f} s", flush=True)
        if done < _STEPS.value:
            state = nnx.to_pure_dict(nnx.state((model, optimizer)))
            save = ocp.args.StandardSave(state), grain.checkpoint.CheckpointSave(data)
            manager.save(_STEPS.value, args=ocp.args.Composite(state=save[0], data=save[1]))


if __name__ == "__main__":
    app.run(main)
