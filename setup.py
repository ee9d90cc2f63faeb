"""Package metadata. Tool configuration is in pyproject.toml."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "vla_jax" / "__init__.py").read_text("utf-8"), re.MULTILINE
)[1]

URL = "https://github.com/vla-jax/vla-jax"
EXAMPLES = ["orbax-checkpoint", "tqdm", "matplotlib"]
STACKS = ["grain", "orbax-checkpoint"]

setup(
    name="vla-jax",
    version=VERSION,
    description="Variational Linear Attention in JAX: exact, chunkwise, linear in the length",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    url=URL,
    project_urls={
        "Documentation": f"{URL}/tree/main/docs",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    },
    packages=find_packages(include=["vla_jax", "vla_jax.*"]),
    package_data={"vla_jax": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["jax>=0.10,<0.13", "flax", "optax", "chex", "absl-py"],
    extras_require={
        "examples": EXAMPLES,
        "tensorboard": ["tensorboardX"],
        "stacks": STACKS,
        "test": [
            "pytest",
            "pytest-xdist",
            "pytest-timeout",
            "hypothesis",
            "mypy",
            *EXAMPLES,
            *STACKS,
        ],
        "lint": ["ruff", "mypy"],
        "docs": ["sphinx", "myst-parser", "furo"],
        "cuda12": ["jax[cuda12]"],
        "cuda13": ["jax[cuda13]"],
        "triton": ["jax-triton==0.3.1"],  # 0.4.1 fails with jax 0.12
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
