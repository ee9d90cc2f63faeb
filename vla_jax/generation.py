"""Text from a model: sampling, and decoding in one compiled loop.

Any model that reads a prompt into a state and then steps from token to token can be used:

    prefill(ids [B, T], mask [B, T]) -> (logits [B, T, V] or [B, V], state)
    step(token [B], state) -> (logits [B, V], state)

Every array of the state has the batch axis first. Wrap parameters in ``jax.tree_util.Partial``, so
that they are arguments of the compiled loop and no constants in it:

    step = Partial(lambda params, token, state: ..., params)
    result = generate(prefill, step, *left_pad([b"def ", b"import"]), key=jax.random.key(0),
                      max_new=100, temperature=0.8, stop=(0,))

``generate`` runs to the end; ``stream`` yields the same tokens as they come.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import meshes, numerics, validation
from vla_jax.types import Array, Arrays

NO_TOKEN = -1  # what ``sample`` draws from NaN under jit

Prefill = Callable[[Array, Array], tuple[Array, Any]]
Step = Callable[[Array, Any], tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Generation(Arrays):
    """What was generated; a pytree.

    Attributes:
      tokens: ``[B, N]`` int32, the new tokens of each sequence, then zeros. A stop token that was
        met is the last of its sequence.
      lengths: ``[B]`` int32, how many of them there are.
      done: ``[B]`` bool, whether a stop token was met.
      logits: ``[B, V]``, of the token after the last one.
      state: after reading prompt and new tokens: to go on from.
    """

    tokens: Array
    lengths: Array
    done: Array
    logits: Array
    state: Any


@meshes.explicit("...")
@numerics.broadcasts
def sample(
    logits: Array,
    key: Array | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Array:
    """Draws a token for each row of logits.

    Args:
      logits: ``[..., V]``, floating point.
      key: a random key; None only with ``temperature=0``.
      temperature: divides the logits; 0 takes the likeliest token, and so does in the limit
        whatever is near it.
      top_k: draw from the so many likeliest tokens (and those as likely as the last of them).
      top_p: draw from the fewest likeliest tokens whose probabilities, after ``temperature`` and
        ``top_k``, reach this sum.

    Returns:
      ``[...]`` int32; under ``jit``, where nothing can be raised, ``NO_TOKEN`` (−1) for a row with
      NaN.

    Raises:
      ValueError, TypeError: naming the argument that is wrong; NaN among the logits is.
    """
    _check_sampling(temperature, top_k, top_p)
    if isinstance(logits, np.ndarray):
        validation.native_order("logits", logits)
    if not isinstance(logits, jax.Array | np.ndarray) or not jnp.issubdtype(
        logits.dtype, jnp.floating
    ):
        raise TypeError("logits must be a floating-point array")
    if logits.ndim < 1 or not logits.shape[-1]:
        raise ValueError(f"logits must have shape [..., V] with V >= 1, got {list(logits.shape)}")
    if temperature and key is None:
        raise ValueError("key must be a random key, got None: only temperature=0 needs none")
    logits = validation.as_array("logits", logits)
    unknown = jnp.any(jnp.isnan(logits), axis=-1)
    if validation.is_concrete(unknown) and np.any(unknown):
        raise ValueError(f"logits must not be NaN, got NaN in {np.sum(unknown)} of their rows")
    if temperature == 0:
        token = jnp.argmax(logits, axis=-1)
    else:
        token = jax.random.categorical(key, _scaled(logits, float(temperature), top_k, top_p))
    return jnp.where(unknown, NO_TOKEN, token).astype(jnp.int32)


def _scaled(logits: Array, temperature: float, top_k: int | None, top_p: float | None) -> Array:
    """Logits over the temperature, −∞ where ``top_k`` and ``top_p`` leave nothing."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # Below the likeliest: a quotient that overflows is −∞ then, and never NaN.
    likeliest = jnp.max(logits, axis=-1, keepdims=True)
    divisor = jnp.asarray(min(temperature, float(jnp.finfo(logits.dtype).max)), logits.dtype)
    # The quotient may be a product with a reciprocal that is 0, and −∞ times 0 is NaN.
    quotient = jnp.where(logits == -jnp.inf, -jnp.inf, (logits - likeliest) / divisor)
    logits = jnp.where(logits == likeliest, 0, quotient)
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        top_p = float(top_p)
        order = jnp.argsort(-logits, axis=-1)
        probability = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1))
        before = jnp.cumsum(probability, axis=-1) - probability
        # The likeliest token always stays; argsort of a permutation is its inverse.
        kept = (before < top_p).at[..., 0].set(True)
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits


def left_pad(prompts: Sequence[Sequence[int]], length: int | None = None) -> tuple[Array, Array]:
    """Prompts of different lengths as ``(ids [B, T] int32, mask [B, T])``, padded on the left.

    Args:
      prompts: token ids; ``bytes`` are ids of bytes.
      length: T; None for the longest prompt. A fixed one avoids recompilation.

    Raises:
      TypeError: if a prompt holds anything but integers, such as a ``str``.
      ValueError: if there is no prompt, an empty one, one longer than ``length``, or an id that
        is negative or does not fit in int32.
    """
    if isinstance(prompts, str | bytes):
        raise TypeError(f"prompts must be a sequence of prompts, got one {type(prompts).__name__}")
    try:
        given = list(prompts)
    except TypeError as error:
        raise TypeError(f"prompts must be a sequence of prompts, got {prompts!r:.60}") from error
    rows = [_token_ids("prompts", prompt) for prompt in given]
    if length is not None:
        validation.positive("length", length, integer=True)
    if not rows or not all(map(len, rows)):
        raise ValueError("prompts must be one or more, each of at least one token")
    if (least := min(row.min() for row in rows)) < 0:
        raise ValueError(f"prompts must be token ids, which are not negative, got {least}")
    longest = max(map(len, rows))
    length = longest if length is None else length
    if length < longest:
        raise ValueError(f"length must be at least that of the longest prompt, {longest}")
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, True
    return jnp.asarray(ids), jnp.asarray(mask)


def _token_ids(name: str, ids: Any) -> np.ndarray:
    """One sequence of token ids as int32."""
    if isinstance(ids, str):
        raise TypeError(f"{name} must be token ids, got the str {ids[:20]!r}: encode it")
    try:
        tokens = ids.tolist() if isinstance(ids, jax.Array | np.ndarray) else list(ids)
        wrong = next((x for x in tokens if isinstance(x, bool | np.bool_)), None)
        if wrong is None:
            tokens = [operator.index(token) for token in tokens]
    except TypeError as error:
        raise TypeError(f"{name} must be sequences of integers, got {ids!r:.60}") from error
    if wrong is not None:
        raise TypeError(f"{name} must be sequences of integers, got {wrong!r}")
    for token in tokens:
        if not -(2**31) <= token < 2**31:
            raise ValueError(f"{name} must be token ids that fit in int32, got {token}")
    return np.asarray(tokens, np.int32)


def generate(
    prefill: Prefill,
    step: Step,
    prompts: Array,
    mask: Array | None = None,
    *,
    max_new: int,
    key: Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] = (),
) -> Generation:
    """Continues prompts until each has met a stop token or ``max_new`` tokens are there.

    The prompt is read at once (``prefill``), then one ``lax.while_loop`` decodes. Token ``i`` is
    drawn with ``jax.random.fold_in(key, i)``, so ``stream`` draws the same ones. The loop compiles
    once for a shape.

    Args:
      prefill, step: the model, as the module's documentation says.
      prompts: ``[B, T]`` token ids.
      mask: ``[B, T]`` booleans, False for padding, which must be on the left; None for none.
      max_new: tokens to generate at most.
      key, temperature, top_k, top_p: as in ``sample``.
      stop: token ids that end a sequence.

    Raises:
      ValueError, TypeError: naming the argument that is wrong.
    """
    validation.positive("max_new", max_new, integer=True)
    options: dict[str, Any] = {
        "key": key,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    chunks = stream(
        prefill, step, prompts, mask, max_new=max_new, chunk=max_new, stop=stop, **options
    )
    return next(chunks)


def stream(
    prefill: Prefill,
    step: Step,
    prompts: Array,
    mask: Array | None = None,
    *,
    max_new: int | None,
    chunk: int = 16,
    key: Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] = (),
    drawn: int = 0,
) -> Iterator[Generation]:
    """``generate``, yielding the tokens in chunks as they come.

    Args:
      prefill, step, prompts, mask, key, temperature, top_k, top_p, stop: as in ``generate``.
      max_new: tokens to generate at most; None for no bound.
      chunk: tokens of a yielded chunk, at most.
      drawn: tokens already drawn with ``key``: to go on where an earlier stream stood, with the
        draws that it would have made.

    Returns:
      An iterator of ``Generation`` values, each with the tokens since the one before; arguments are
      checked before it is returned. It ends when every sequence has met a stop token.
    """
    if max_new is not None:
        validation.positive("max_new", max_new, integer=True)
    validation.positive("chunk", chunk, integer=True)
    if not isinstance(drawn, int | np.integer) or isinstance(drawn, bool):
        raise TypeError(f"drawn must be an integer, got {type(drawn).__name__}")
    if drawn < 0:
        raise ValueError(f"drawn must not be negative, got {drawn}")
    _check_sampling(temperature, top_k, top_p)
    if temperature and key is None:
        raise ValueError("key must be a random key, got None: only temperature=0 needs none")
    prompts, mask = _check_prompts(prompts, mask)
    stop = tuple(_token_ids("stop", stop).tolist())
    decode = functools.partial(
        _decode,
        chunk=chunk,
        sampling=(("temperature", temperature), ("top_k", top_k), ("top_p", top_p)),
        stop=stop,
    )
    return _chunks(
        _partial(prefill), _partial(step), decode, prompts, mask, key, max_new, chunk, drawn
    )


def _chunks(prefill, step, decode, prompts, mask, key, max_new, chunk, drawn):
    logits, state = _prefill(prefill, prompts, mask)
    done = jnp.zeros(prompts.shape[0], bool)
    for start in itertools.count(0, chunk):
        limit = chunk if max_new is None else min(chunk, max_new - start)
        if limit <= 0 or (start and bool(jnp.all(done))):
            return
        result = decode(step, logits, state, done, key, drawn + start, limit)
        logits, state, done = result.logits, result.state, result.done
        if validation.is_concrete(result.tokens) and np.any(result.tokens == NO_TOKEN):
            raise ValueError("the logits of the model must not be NaN: are its parameters?")
        yield result


@jax.jit
def _prefill(prefill, prompts, mask):
    logits, state = prefill(prompts, mask)
    return (logits[:, -1] if logits.ndim == 3 else logits), state


@functools.partial(jax.jit, static_argnames=("chunk", "sampling", "stop"))
@meshes.explicit()
def _decode(step, logits, state, done, key, start, limit, *, chunk, sampling, stop):
    def going(carry):
        i, _, _, done, _, _ = carry
        return (i < limit) & ~jnp.all(done)

    def body(carry):
        i, logits, state, done, tokens, lengths = carry
        token_key = None if key is None else jax.random.fold_in(key, start + i)
        token = jnp.where(done, 0, sample(logits, token_key, **dict(sampling)))
        next_logits, next_state = step(token, state)
        # A sequence that has ended stays as it was.
        keep = lambda old, new: jnp.where(_rows(done, old), old, new.astype(old.dtype))  # noqa: E731
        logits, state = jax.tree.map(keep, (logits, state), (next_logits, next_state))
        tokens, lengths = tokens.at[:, i].set(token), lengths + (~done).astype(jnp.int32)
        ends = jnp.isin(token, jnp.asarray(stop, jnp.int32)) if stop else jnp.zeros_like(done)
        return i + 1, logits, state, done | ends, tokens, lengths

    batch = done.shape[0]
    empty = jnp.zeros((batch, chunk), jnp.int32), jnp.zeros(batch, jnp.int32)
    carry = (jnp.asarray(0), logits, state, done, *empty)
    _, logits, state, done, tokens, lengths = jax.lax.while_loop(going, body, carry)
    return Generation(tokens, lengths, done, logits, state)


def _rows(flags: Array, like: Array) -> Array:
    return flags.reshape(-1, *(1,) * (like.ndim - 1))


def _partial(function: Callable[..., Any]) -> jax.tree_util.Partial:
    """A callable that ``jit`` takes as an argument; what a Partial holds is data."""
    if not callable(function):
        raise TypeError(f"prefill and step must be callable, got {type(function).__name__}")
    if isinstance(function, jax.tree_util.Partial):
        return function
    return jax.tree_util.Partial(function)


def _check_prompts(prompts: Any, mask: Any) -> tuple[Array, Array]:
    if not isinstance(prompts, jax.Array | np.ndarray) or not jnp.issubdtype(
        prompts.dtype, jnp.integer
    ):
        raise TypeError("prompts must be an array of integers; left_pad makes one")
    validation.native_order("prompts", prompts)
    if validation.is_concrete(prompts) and prompts.size:  # before they are narrowed
        for token in (np.asarray(prompts).min(), np.asarray(prompts).max()):
            if not -(2**31) <= token < 2**31:
                raise ValueError(f"prompts must be token ids that fit in int32, got {token}")
    validation.check_shape("prompts", jnp.asarray(prompts), (None, None), "[B, T]")
    present = validation.mask(mask, *prompts.shape)
    if present is None:
        present = jnp.ones(prompts.shape, bool)
    if validation.is_concrete(present):
        rows = np.asarray(present)
        if not rows[:, -1].all() or (rows[:, :-1] & ~rows[:, 1:]).any():
            raise ValueError(
                "mask must be True up to the last token of every prompt: pad on the left (left_pad)"
            )
    return jnp.asarray(prompts), present


def _check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    numbers = (int, float, np.integer, np.floating)
    if isinstance(temperature, bool) or not isinstance(temperature, numbers):
        raise TypeError(f"temperature must be a number, got {type(temperature).__name__}")
    try:
        finite = math.isfinite(temperature)
    except OverflowError:  # an integer
        finite = False
    if not temperature >= 0 or not finite:
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if top_k is not None:
        validation.positive("top_k", top_k, integer=True)
    if top_p is not None:
        validation.positive("top_p", top_p)
        if top_p > 1:
            raise ValueError(f"top_p must be at most 1, got {top_p}")
