"""Options of the layer that go together, by name.

    layer = vla_jax.nnx.SelfAttention(8, 512, preset="recall", rngs=rngs)
    layer = vla_jax.nnx.VariationalLinearAttention(8, 512, **presets.options("recall"), rngs=rngs)

"published"
    The paper's layer: a learned direction, the ratio, a LayerNorm, no convolution. Measured on
    multi-query associative recall in the paper's setting: .999 of 24 pairs and .998 of 32, three
    seeds. For models without a short convolution whose positions come from elsewhere.
"recall"
    A short convolution of width 4, no ratio, an RMS norm for each head. Measured on recall in
    Zoology's layout, best of four learning rates, three seeds: .988 of 16 pairs ("published" with
    the convolution .881, DeltaNet .996, softmax 1.000), .462 of 32 (with
    ``feature_map=jax.nn.silu`` .795, DeltaNet .617, softmax 1.000), .998 at a length of 512 and
    .995 at 4096 without training there. Not measured on text.
"language"
    The memory and its penalty forget, each token has a learned weight, and the inverse is applied
    to the query: ridge regression with forgetting, with the same convolution and norm. From one
    trial with a first draft of this method (one seed, 29.6M parameters, 500 of 2000 steps on bytes
    of Python that were read once): 1.59 bits per byte, gated DeltaNet 1.61, the inverse at the
    write with forgetting 1.63 to 1.64, without forgetting 1.74. Not measured on recall. The solve
    costs conjugate gradients in each chunk; ``"pallas"`` and ``"triton"`` may refuse it.

The layer knows no positions, whatever the preset: without a short convolution it tells the order of
tokens only by what forgetting and overwriting leave of them. A model whose attention applies RoPE
has no other positions, and loses them with that attention. ``short_conv`` (of "recall" and
"language") brings the order of near tokens back, and is all that most such models need; with
"published" add an embedding of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from vla_jax import validation

__all__ = ["PRESETS", "options"]

_PUBLISHED = {
    "direction": "learned",
    "readout": "ratio",
    "inverse": "write",
    "beta": False,
    "decay": False,
    "short_conv": None,
    "output_norm": "layer",
}
_RECALL = _PUBLISHED | {"readout": "none", "short_conv": 4, "output_norm": "rms_per_head"}
_LANGUAGE = _RECALL | {"direction": "key", "inverse": "read", "beta": True, "decay": True}

# Every preset sets the same options.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "published": MappingProxyType(_PUBLISHED),
        "recall": MappingProxyType(_RECALL),
        "language": MappingProxyType(_LANGUAGE),
    }
)
# The value of an option that is left to the preset.
FROM_PRESET: Final = "preset"


def options(preset: str, **overrides: Any) -> dict[str, Any]:
    """The options of a preset, as keyword arguments of either layer.

    Args:
      preset: ``"published"``, ``"recall"`` or ``"language"``.
      **overrides: options of the layer that take the place of the preset's or join them. The value
        ``"preset"`` leaves an option to the preset.

    Raises:
      ValueError: if there is no such preset.
    """
    validation.choice("preset", preset, tuple(PRESETS))
    given = {name: x for name, x in overrides.items() if not _left(x)}
    return {**PRESETS[preset], **given}


def _left(value: Any) -> bool:
    return isinstance(value, str) and value == FROM_PRESET
