# make mqar    trains the main example; ARGS="--num_pairs=16" passes flags on
# make lm      trains a byte-level language model and lets it write; ARGS="--model=deltanet"
# make test    runs the tests;          ARGS="-k attention" likewise
# make smoke   runs one test of every public function and layer, in two minutes
# make triton  lowers the kernel of jax-triton for CUDA, for which it installs 1 GB but needs no GPU
# make lint    checks style and types
# make bench   runs the benchmarks
# make docs    builds the documentation in build/docs, warnings as errors
# make package builds wheel and sdist in build/dist, each installed and tried outside the repository
#
# Each target first makes a virtual environment in VENV with PYTHON and installs what it needs.
# (compat: a path, not an import hook, which a folder named vla_jax beside a script would hide.)
# EXTRAS names further extras of setup.py, such as EXTRAS=cuda13 for an NVIDIA GPU.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
WORKERS ?= 2
ARGS ?=
LM_DIR ?= runs/lm

comma := ,
empty :=
python := $(VENV)/bin/python
# A stamp for each set of extras, named after it: a new set or a newer setup.py installs again.
stamp = $(VENV)/.installed-$(subst $(empty) ,$(comma),$(strip $(1) $(EXTRAS)))

.PHONY: mqar lm test smoke triton lint bench docs package clean

mqar: $(call stamp,examples)
	$(python) examples/mqar.py $(ARGS)

lm: $(call stamp,examples)
	$(python) examples/train_lm.py --out_dir=$(LM_DIR) $(ARGS)
	$(python) examples/generate.py --run=$(LM_DIR)

test: $(call stamp,test) $(VENV)/.recurrentgemma
	$(python) -m pytest -n $(WORKERS) --dist=worksteal $(ARGS)

smoke: $(call stamp,test)
	$(python) -m pytest -n $(WORKERS) tests/test_smoke.py $(ARGS)

triton: $(call stamp,test triton)
	$(python) -m pip install --no-deps jax-cuda12-plugin==$$($(python) -c "import jaxlib; print(jaxlib.__version__)")
	CI=1 $(python) -m pytest -n 0 tests/test_triton.py $(ARGS)

lint: $(call stamp,lint)
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy

bench: $(call stamp,examples)
	$(python) benchmarks/run.py $(ARGS)

docs: $(call stamp,docs)
	$(python) -m sphinx -W --keep-going -b html docs build/docs $(ARGS)

package:
	PYTHON=$(PYTHON) .ci/package

clean:
	rm -rf $(VENV)

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed-%: setup.py $(VENV)/.created
	$(python) -m pip install --editable ".[$*]" --config-settings editable_mode=compat
	touch $@

# A third party's model, which tests/test_stacks.py trains.
$(VENV)/.recurrentgemma: examples/stacks/recurrentgemma.txt $(VENV)/.created
	$(python) -m pip install --no-deps --requirement $<
	touch $@
