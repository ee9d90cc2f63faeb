"""The arms of the grids and how they are trained: models that differ in the mixer alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from model import ModelConfig, parameter_count, with_parameter_count
from training import TrainConfig

_KEY: dict[str, Any] = {"mixer": "vla", "direction": "key", "readout": "none"}
_GATED = _KEY | {"beta": True, "decay": True}
_READ = _GATED | {"inverse": "read"}
_NO_RATIO: dict[str, Any] = {
    "mixer": "vla",
    "readout": "none",
    "output_norm": "rms_per_head",
}
LAMBDAS = (0.01, 1.0, 10.0)
_SCALED: dict[str, dict[str, Any]] = {
    "vla": {"mixer": "vla"},
    "vla key": {"mixer": "vla", "direction": "key"},
    "vla no ratio rms": _NO_RATIO,
    "deltanet": {"mixer": "deltanet"},
    "softmax": {"mixer": "softmax"},
}

# The published method and its opponents, then one option at a time, then what is exact.
ARMS: dict[str, dict[str, Any]] = {
    "vla": {"mixer": "vla", "output_norm": "layer"},
    "deltanet": {"mixer": "deltanet"},
    "published_deltanet": {"mixer": "published_deltanet"},
    "softmax": {"mixer": "softmax"},
    "linear": {"mixer": "linear"},
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "mesa": {"mixer": "mesa"},
    "identity": {"mixer": "identity"},
    "deltanet elu": {"mixer": "deltanet_elu"},
    "vla key": {"mixer": "vla", "direction": "key"},
    "vla projection": {"mixer": "vla", "write_gain": "projection"},
    "vla rls": {"mixer": "vla", "write_gain": "rls"},
    "vla key projection": {"mixer": "vla", "direction": "key", "write_gain": "projection"},
    "vla key rls": {"mixer": "vla", "direction": "key", "write_gain": "rls"},
    "vla no ratio": {"mixer": "vla", "readout": "none"},
    "vla key no ratio": _KEY,
    "vla rms": {"mixer": "vla", "output_norm": "rms_per_head"},
    "vla no ratio rms": _NO_RATIO,
    "vla key no ratio rms": {
        "mixer": "vla",
        "direction": "key",
        "readout": "none",
        "output_norm": "rms_per_head",
    },
    "vla silu no ratio rms": {
        "mixer": "vla_silu",
        "readout": "none",
        "output_norm": "rms_per_head",
    },
    "vla key silu no ratio": {"mixer": "vla_silu", "direction": "key", "readout": "none"},
    "vla beta": _KEY | {"beta": True},
    "vla decay": _KEY | {"decay": True},
    "vla gated": _GATED,
    "vla gated read": _READ,
    "vla read": _KEY | {"inverse": "read"},
    "gated_mesa": {"mixer": "gated_mesa"},
    "vla gated projection": _GATED | {"write_gain": "projection"},
    "vla gated rls": _GATED | {"write_gain": "rls"},
    "vla silu gated read": _READ | {"mixer": "vla_silu"},
    "vla gated read layer norm": _READ | {"output_norm": "layer"},
    "hybrid": _READ | {"layers": ("vla", "vla", "vla", "softmax")},
    # Lambda0 of what recalls best, and of what has u from the key (where it was .1 everywhere).
    **{f"vla no ratio rms {x}": _NO_RATIO | {"lambda0": x} for x in LAMBDAS},
    **{f"vla key no ratio {x}": _KEY | {"lambda0": x} for x in LAMBDAS},
    "vla no ratio rms learned": _NO_RATIO | {"learn_lambda0": True},
    "vla key no ratio learned": _KEY | {"learn_lambda0": True},
    # Controls: no penalty at all with the features and the norm of the best; the delta rule with
    # as much state as VLA, whose penalty is half of it.
    "identity silu rms": {"mixer": "identity_silu", "output_norm": "rms_per_head"},
    "deltanet wide": {"mixer": "deltanet", "head_dim": 45},
    # Embeddings of length √d to begin with.
    **{f"{arm} std 1": options | {"embedding_std": 1.0} for arm, options in _SCALED.items()},
    "deltanet negative": {"mixer": "deltanet", "allow_neg_eigval": True},
    "gated_deltanet negative": {"mixer": "gated_deltanet", "allow_neg_eigval": True},
}


def model_of(arm: str, match: bool = False, **sizes: Any) -> ModelConfig:
    """The model of an arm; with ``match`` it has as many parameters as ``"vla"``, by its FFN.

    The ``layers`` of an arm are repeated to the number that the model has.
    """
    options = sizes | ARMS[arm]
    if "layers" in options:
        options["num_layers"] = options.get("num_layers", ModelConfig.num_layers)
        repeated = itertools.cycle(options["layers"])
        options["layers"] = tuple(itertools.islice(repeated, options["num_layers"]))
    config = ModelConfig(**options)
    if not match:
        return config
    # All arms have the same embeddings, of which the difference does not depend.
    small = {"vocab_size": 1, "max_length": None}
    count = parameter_count(ModelConfig("vla", **(sizes | small)))
    matched = with_parameter_count(ModelConfig(**(options | small)), count)
    return dataclasses.replace(config, ffn_dim=matched.ffn_dim)


# The published experiments: AdamW 3e-4 with warm-up 300 and cosine, batch 64, early stop.
PUBLISHED = TrainConfig(
    steps=3000, batch_size=64, learning_rate=3e-4, warmup=300, eval_every=100, eval_batches=4
)
PUBLISHED_RATES = (3e-4,)
FAIR = dataclasses.replace(PUBLISHED, warmup=100)
FAIR_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)

# Arms of the published comparison, with DeltaNet as it is beside the published one, and A ≡ I.
PUBLISHED_ARMS = (
    "vla",
    "identity",
    "published_deltanet",
    "deltanet",
    "deltanet elu",
    "linear",
    "softmax",
)
# Arms that decide what VLA buys, then everything else.
FAIR_ARMS = ("vla", "deltanet", "vla key", "identity", "mesa", "gated_deltanet", "softmax")
ABLATIONS = (
    "deltanet elu",
    "vla key projection",
    "vla key no ratio",
    "vla no ratio",
    "vla projection",
    "vla rms",
    "vla no ratio rms",
    "vla key no ratio rms",
    "vla silu no ratio rms",
    "vla key silu no ratio",
    "linear",
    "vla rls",
    "vla key rls",
)
# What lambda0 and the controls say of the best arms; then the same of other embeddings.
LAMBDA_ARMS = (
    *(f"vla no ratio rms {x}" for x in (*LAMBDAS, "learned")),
    *(f"vla key no ratio {x}" for x in (*LAMBDAS, "learned")),
    "identity silu rms",
    "deltanet wide",
)
SCALED_ARMS = tuple(f"{arm} std 1" for arm in _SCALED)
# What weights, decay and the inverse at the read are worth; beside "vla key no ratio".
GATED_ARMS = ("vla gated read", "vla gated", "gated_mesa", "vla decay", "vla beta", "vla read")

# What a plot with more arms than can be told apart is split into: six at most, the
# first of which the question is about.
QUESTIONS = {
    "mixers": ("softmax", "mesa", "gated_deltanet", "deltanet", "linear", "vla"),
    "penalty": ("vla", "identity", "deltanet elu", "published_deltanet", "deltanet", "vla key"),
    "read-out and norm": (
        "vla", "vla no ratio", "vla rms", "vla no ratio rms", "vla key no ratio",
        "vla key no ratio rms",
    ),
    "write gain": (
        "vla", "vla projection", "vla rls", "vla key", "vla key projection", "vla key rls",
    ),
    "features": (
        "vla no ratio rms", "vla silu no ratio rms", "vla key no ratio", "vla key silu no ratio",
        "identity silu rms", "deltanet",
    ),
    "gates": (
        "vla gated read", "vla gated", "vla decay", "vla beta", "vla read", "vla key no ratio",
    ),
    "gated mixers": ("vla gated read", "gated_mesa", "gated_deltanet", "deltanet wide", "softmax"),
    "lambda0": ("vla no ratio rms", *(f"vla no ratio rms {x}" for x in (*LAMBDAS, "learned"))),
    "lambda0, u from the key": (
        "vla key no ratio", *(f"vla key no ratio {x}" for x in (*LAMBDAS, "learned")),
    ),
    "embeddings": SCALED_ARMS,
    "states": (
        "deltanet negative", "deltanet", "gated_deltanet negative", "gated_deltanet",
        "vla no ratio rms", "vla gated read",
    ),
}  # fmt: skip
# The same of text, where "vla gated read" stands for VLA.
TEXT_QUESTIONS = {
    "mixers": ("softmax", "hybrid", "vla gated read", "gated_deltanet", "deltanet", "linear"),
    "gates": ("vla gated read", "vla gated", "vla decay", "vla beta", "vla key no ratio", "vla"),
    "the rest": (
        "vla gated read", "vla silu gated read", "vla gated read layer norm", "vla read",
        "vla gated projection", "vla gated rls",
    ),
}  # fmt: skip
