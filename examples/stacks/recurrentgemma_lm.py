r"""RecurrentGemma's Griffin, with this memory in the place of its local attention.

    pip install --no-deps --requirement examples/stacks/recurrentgemma.txt
    python examples/stacks/recurrentgemma_lm.py --steps=20

Griffin looks its attention block up in ``recurrentgemma.jax.modules``: ``Attention`` below has that
block's arguments and takes its place there. It trains the model on packed rows, then reads a row at
once and byte by byte and compares the two.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import optax
from absl import app, flags
from flax import linen
from packed_text import VOCAB_SIZE, batches

import vla_jax.linen
from vla_jax import packing, presets
from vla_jax.layer import LayerConfig, init_state

# Its types name the cache of local attention, which this block has no use for.
jaxtyping.config.update("jaxtyping_disable", True)
from recurrentgemma import common  # noqa: E402
from recurrentgemma.jax import griffin, modules  # noqa: E402

_WIDTH = flags.DEFINE_integer("width", 64, "Of the model.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 2, "Of each layer.", lower_bound=1)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 128, "Tokens of a row.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Of the optimiser.", lower_bound=1)


class Attention(linen.Module):
    """``LocalAttentionBlock`` with a memory of constant size instead of a window of keys."""

    width: int
    num_heads: int
    window_size: int
    final_w_init_variance_scale: float = 1.0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x, segment_pos, cache=None, return_cache=True):
        layer = vla_jax.linen.VariationalLinearAttention(
            self.num_heads,
            self.width,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            **presets.options("recall"),
        )
        if cache is not None and x.shape[1] == 1:  # a later byte of what the cache has read
            out, cache = layer.step(x[:, 0], cache)
            return out[:, None], cache
        ids, mask = packing.from_positions(segment_pos)
        out, cache = layer(x, mask=mask, segment_ids=ids, initial_state=cache, return_state=True)
        return out, cache if return_cache else None

    @classmethod
    def init_cache(cls, batch_size, window_size, heads_dim, dtype):
        """The memory of fresh sequences, constant in size."""
        heads = _HEADS.value
        config = LayerConfig(
            num_heads=heads, in_features=heads * heads_dim, **presets.options("recall")
        )
        return init_state(config, batch_size)


modules.LocalAttentionBlock = Attention


def main(_):
    """Trains, then compares reading at once with reading byte by byte."""
    attention, recurrent = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=VOCAB_SIZE,
        width=_WIDTH.value,
        mlp_expanded_width=3 * _WIDTH.value,
        num_heads=_HEADS.value,
        block_types=(recurrent, recurrent, attention),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=_SEQ_LEN.value,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )
    model, tx = griffin.Griffin(config), optax.adamw(3e-3)

    def loss_of(params, batch):
        ids = batch["tokens_segment_ids"]
        counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        positions = jnp.where(ids > 0, batch["tokens_positions"], -1)[:, :-1]
        logits, _ = model.apply(
            params, batch["tokens"][:, :-1], positions, None, True, return_cache=False
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return (losses * counts).sum() / counts.sum()

    @jax.jit
    def train_step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    began = time.perf_counter()
    data = batches(_BATCH_SIZE.value, _SEQ_LEN.value)
    row = jnp.asarray(next(data)["tokens"][:1, :8])
    positions = jnp.arange(row.shape[1])[None]
    params = jax.jit(model.init)(jax.random.key(0), row, positions)
    state = tx.init(params)
    for step in range(1, _STEPS.value + 1):
        params, state, loss = train_step(params, state, next(data))
        if step in (1, _STEPS.value) or step % 20 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step}: loss {loss:.3f} nats per byte, {seconds:.1f} s", flush=True)

    whole, _ = jax.jit(model.apply)(params, row, positions)
    read, cache, one_by_one = jax.jit(model.apply), model.init_cache(1, jnp.float32), []
    for t in range(row.shape[1]):
        logits, cache = read(params, row[:, t : t + 1], positions[:, t : t + 1], cache)
        one_by_one.append(logits)
    difference = jnp.abs(jnp.concatenate(one_by_one, 1) - whole).max()
    print(f"at once and byte by byte: logits differ by {difference:.1e} at most")


if __name__ == "__main__":
    app.run(main)
