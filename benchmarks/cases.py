"""Problems shared by the tests and the benchmarks: shapes, options, and how inputs are drawn.

NumPy only. A `Case` says everything about one call of `vla_attention`; `draw` makes its inputs in
float64. `CASES` is a pairwise-style cover (lengths around chunk edges, D and E of odd sizes and
different from each other, grouped heads, segments, masks, every option), not the full product.
`GPU_CASES` and `table_case` have the sizes of a GPU's kernels. `WORKLOADS` are the shapes that are
timed.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. B batch, T length, H heads, G groups (queries per head), D dim, E value_dim.

    direction: "learned" (a map of the key), "key" (none is given), or "aligned" (a vector common to
        all tokens, of length 1, and a hundredth of the learned one: cond(M) is T / lambda0).
    keys: "random", "equal" (one for all tokens) or "sign" (all entries near 3).
    segments: None, "random" lengths, "single" (several segments of one token among longer ones),
        "edges" (boundaries on, just before and just after multiples of 16).
    mask: None, "random" (four tokens in five are present), "left" or "right" padding.
    degenerate: some keys and some directions are zero although the token is not masked.
    per_head: lambda0 differs between heads.
    """

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    value_dim: int
    direction: str = "learned"
    keys: str = "random"
    segments: str | None = None
    mask: str | None = None
    initial: bool = False
    write_gain: str = "unit"
    readout: str = "ratio"
    lambda0: float = 0.1
    per_head: bool = False
    degenerate: bool = False
    chunk_size: int | None = None

    def __str__(self):
        heads = f"H{self.heads}x{self.groups}"
        shape = f"B{self.batch}-T{self.length}-{heads}-D{self.dim}-E{self.value_dim}"
        words = [
            self.segments and f"{self.segments}_segments",
            self.mask and f"{self.mask}_mask",
            self.direction != "learned" and f"{self.direction}_direction",
            self.keys != "random" and f"{self.keys}_keys",
            self.write_gain != "unit" and self.write_gain,
            self.readout != "ratio" and "no_ratio",
            self.initial and "initial",
            self.degenerate and "degenerate",
            self.lambda0 != 0.1 and f"lambda0_{self.lambda0:g}",
        ]
        return "-".join([shape, *filter(None, words)])


CASES = (
    Case(2, 1, 1, 1, 4, 5, initial=True),
    Case(1, 2, 2, 2, 5, 4, segments="single", per_head=True, initial=True),
    Case(2, 15, 2, 1, 16, 5, mask="left", direction="key", chunk_size=16, degenerate=True),
    Case(1, 16, 1, 3, 4, 16, mask="right", initial=True, write_gain="projection", chunk_size=16),
    Case(2, 17, 1, 1, 8, 5, segments="single", readout="none", initial=True, chunk_size=4),
    Case(1, 63, 2, 2, 32, 16, write_gain="rls", direction="key", lambda0=10.0, per_head=True),
    Case(2, 64, 2, 1, 16, 32, segments="edges", mask="random", initial=True, chunk_size=16),
    Case(3, 65, 1, 2, 5, 4, segments="random", initial=True, degenerate=True, per_head=True),
    Case(1, 100, 3, 1, 64, 32, mask="random", write_gain="projection", readout="none"),
    Case(2, 100, 2, 2, 16, 5, segments="edges", write_gain="rls", initial=True, chunk_size=32),
    Case(1, 1000, 2, 1, 16, 64, segments="random", mask="random", initial=True),
    Case(1, 1000, 1, 2, 32, 16, direction="key", initial=True, lambda0=1e-2),
)

# In float32 and bfloat16 on a GPU. Equal keys without the ratio, whose query has no gradient.
GPU_CASES = (
    Case(1, 17, 2, 2, 64, 32, segments="random", initial=True),
    Case(1, 64, 2, 1, 128, 128, write_gain="projection", initial=True),
    Case(1, 64, 2, 1, 24, 40, direction="key", write_gain="rls", readout="none"),
    Case(1, 1000, 2, 1, 64, 64, segments="random", initial=True),
    Case(1, 1000, 2, 1, 64, 64, direction="key", keys="equal", readout="none"),
    Case(1, 1000, 2, 1, 64, 64, direction="key", keys="sign"),
    Case(1, 1000, 2, 1, 64, 64, direction="aligned"),
    Case(1, 1000, 2, 1, 64, 64, lambda0=1e-3),
    Case(1, 1000, 2, 1, 64, 64, lambda0=1e3),
    Case(1, 4096, 2, 1, 64, 64),
    Case(1, 4096, 1, 1, 128, 128),
)
# Of the chunkwise paths alone: one launch for all tokens is for short sequences.
LONG = Case(1, 65536, 1, 1, 64, 64)


def table_case(dim):
    """For the entry of a kernel's table of parameters: D = E = ``dim``."""
    return Case(1, 200, 2, 1, dim, dim, segments="random", initial=True)


# name -> the work of one timed call: 65,536 tokens, but for the longest and
# for the one that suits two CPU cores.
WORKLOADS = {
    "cpu-d32-T4096": Case(1, 4096, 4, 1, 32, 32),
    "d64-T1024": Case(64, 1024, 16, 1, 64, 64),
    "d64-T4096": Case(16, 4096, 16, 1, 64, 64),
    "d64-T16384": Case(4, 16384, 16, 1, 64, 64),
    "d64-T65536": Case(1, 65536, 16, 1, 64, 64),
    "d64-T131072": Case(1, 131072, 16, 1, 64, 64),
    "d64-T262144": Case(1, 262144, 16, 1, 64, 64),
    "d64-T524288": Case(1, 524288, 16, 1, 64, 64),
    "d128-T1024": Case(64, 1024, 8, 1, 128, 128),
    "d128-T4096": Case(16, 4096, 8, 1, 128, 128),
    "d128-T16384": Case(4, 16384, 8, 1, 128, 128),
    "d128-T65536": Case(1, 65536, 8, 1, 128, 128),
}


def feature_map(x):
    """elu(x) + 1."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def segment_ids(kind, batch, length, rng):
    """[B,T] non-decreasing ids, different in each row of the batch, not starting at 0."""
    ids = np.zeros((batch, length), np.int32)
    if kind == "random":
        ids += (rng.random((batch, length)) < max(0.05, 2 / length)).astype(np.int32)
    elif kind == "single":
        ids += (rng.random((batch, length)) < 0.7).astype(np.int32)
    elif kind == "edges":
        edges = [e for e in (16, 31, 32, 48, 49, 64, 96, 99) if e < length]
        for row in range(batch):
            ids[row, edges[row % 2 :: 2] if row else edges] = 1 + row
    return (3 + np.cumsum(ids, axis=1)).astype(np.int32)


def token_mask(kind, batch, length, rng):
    """[B,T] bool; False is padding."""
    if kind == "random":
        return rng.random((batch, length)) < 0.8
    pad = rng.integers(1, max(2, length // 3), size=(batch, 1))
    position = np.arange(length)
    return position >= pad if kind == "left" else position < length - pad


def draw(case, seed=0):
    """Keyword arguments of one call, in float64.

    query, key, value, direction (or None), lambda0, initial_state ((memory, penalty, key_sum) or
    None), segment_ids (or None), mask (or None).

    Keys pass through the feature map (so they are correlated), directions are a fixed linear map
    of the key, of length 1/sqrt(D), as in the layer.
    """
    rng = np.random.default_rng(seed)
    batch, length, heads, dim, value_dim = (
        case.batch,
        case.length,
        case.heads,
        case.dim,
        case.value_dim,
    )
    raw = rng.standard_normal((batch, length, heads, dim))
    key = feature_map(raw)
    query = feature_map(rng.standard_normal((batch, length, heads * case.groups, dim)))
    value = rng.standard_normal((batch, length, heads, value_dim))
    if case.keys == "equal":
        key = np.repeat(key[:, :1], length, axis=1)
    elif case.keys == "sign":
        key = 3 + 0.1 * raw
    direction = None
    if case.direction != "key":
        direction = np.einsum("bthd,hde->bthe", raw, rng.standard_normal((heads, dim, dim)))
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True) * np.sqrt(dim)
    if case.direction == "aligned":
        common = rng.standard_normal(dim)
        direction = 0.01 * direction + common / np.linalg.norm(common)
    if case.degenerate:
        key[rng.random(key.shape[:3]) < 0.2] = 0
        if direction is not None:
            direction[rng.random(key.shape[:3]) < 0.2] = 0
    initial_state = None
    if case.initial:
        past = rng.standard_normal((batch, heads, 2 * dim, dim)) / np.sqrt(dim)
        initial_state = (
            rng.standard_normal((batch, heads, dim, value_dim)),
            np.einsum("bhnd,bhne->bhde", past, past),
            feature_map(rng.standard_normal((batch, heads, dim))),
        )
    return {
        "query": query,
        "key": key,
        "value": value,
        "direction": direction,
        "lambda0": case.lambda0 * (1 + np.arange(heads) if case.per_head else 1.0),
        "initial_state": initial_state,
        "segment_ids": case.segments and segment_ids(case.segments, batch, length, rng),
        "mask": case.mask and token_mask(case.mask, batch, length, rng),
    }
