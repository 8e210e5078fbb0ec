PYTHON ?= python3
VENV ?= .venv
# Arguments of pip, so an option such as --index-url may follow.
TORCH ?= torch==2.13.0

# The demo's weights, too: mxfp8, float8, float8_delayed, float8_block or nvfp4.
QUANTIZE ?=
# The demo's optimizer: fused (FusedAdamW) or muon (FusedMuon).
OPTIMIZER ?=

# What can run here: compiling for GPUs takes minutes. Without a GPU, FUSED_OPTIM_CUDA_ARCHS=90 checks that it compiles.
HAS_GPU := $(shell nvidia-smi --list-gpus 2>/dev/null)
export FUSED_OPTIM_CUDA_ARCHS ?= $(if $(HAS_GPU),,none)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
ENGINE_SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
C_SOURCES := $(ENGINE_SOURCES) $(wildcard tests/*/*.cpp)

.PHONY: demo test smoke test-long test-gpu test-integrations test-torches test-newest-torch peer-suites bench lint format docs docs-check \
    wheel wheels wheel-test release-check check-tag clean FORCE

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py --output demo_output $(if $(QUANTIZE),--quantize $(QUANTIZE)) \
		$(if $(OPTIMIZER),--optimizer $(OPTIMIZER))

# Without their bytecode, each of the many processes that tests start would compile the package's modules again.
unexport PYTHONDONTWRITEBYTECODE

# Two processes, as CI has two cores. A file's tests stay together: groups of ranks and what was compiled are used again.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(VENV)/.installed
	$(PYTEST) -m 'not long and not cuda'

# A case of each journey, in a minute: a step, clipping, Muon under FSDP2, saves and loads, quantized weights, published
# changes, tools.
SMOKE := tests/test_journeys.py tests/step/test_parity.py::test_option tests/step/test_clip.py::test_many_gradients \
    tests/muon/test_muon_sharded.py::test_fsdp2_trains_as_one_process \
    tests/checkpoint/test_checkpointer.py::test_loads_into_other_formats \
    tests/quantized/test_quantized_fsdp.py::test_gathered_weights_are_the_shards_bit_for_bit \
    tests/changes/test_sharded.py::test_what_ranks_hold_is_all_together tests/tools/test_inspector.py::test_models_alone

smoke: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m 'not long and not cuda' $(SMOKE)

# Hypothesis marks its tests; the usual run tries half as many examples.
test-long: export FUSED_OPTIM_TEST_KILLS ?= 5
test-long: export FUSED_OPTIM_TEST_EXAMPLES ?= 60
test-long: $(VENV)/.installed
	$(PYTEST) -m '(long or hypothesis) and not cuda'

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m cuda

# The real packages, on the CPU; the imports first, since tests of a package that is not there are skipped.
INTEGRATIONS := architectures device_maps examples megatron_fsdp megatron_lm drop_in inference_packages exports hugging_face hugging_face_models hugging_face_saves lightning torchtitan

test-integrations: $(VENV)/.installed $(VENV)/.integrations
	$(BIN)/python -W ignore -c 'import megatron.core.optimizer, megatron_fsdp, accelerate, transformers, peft, trl, \
	    lightning, compressed_tensors, torchtitan.components.optimizer, torchao, triton'
	$(BIN)/python -m pytest $(INTEGRATIONS:%=tests/integrations/test_%.py)

# The tests that TransformerEngine, Apex and torch have of their Adam, with ours; docs/contributing/testing.md says what SOURCES holds.
peer-suites: $(VENV)/.installed
	$(BIN)/python benchmarks/peer_suites.py $(SOURCES) --output build/peer_suites.json

# Other releases of torch, each in an environment of its own, with the engines that are there: these fit all of them.
TORCHES ?= torch==2.11.0 torch==2.13.0 torch==2.14.1
NEWEST_TORCH := -r tests/requirements-newest-torch.txt
# Tests of what fused_optim/torch_versions.py names: checkpoints, FSDP2, DTensors, subclasses, compiled code, engines.
TORCH_TESTS := tests/test_torch_versions.py tests/sharding tests/quantized/test_quantized_checkpoint.py \
    $(patsubst %,tests/checkpoint/test_%.py,written_by newer_torch reading saving wrapped_models) \
    $(patsubst %,tests/step/test_%.py,compiled_loop tensor_properties amp) \
    $(patsubst %,tests/engines/test_%.py,tensor_reader interface) \
    $(patsubst %,tests/muon/test_%.py,newton_schulz muon_sharded) \
    $(patsubst %,tests/quantized/test_quantized_%.py,tensor fsdp compile full_tensors)

test-torches: $(TORCHES:%=test-with-%) test-with-newest

test-newest-torch: TORCH_TESTED := $(TORCH_TESTS)
test-newest-torch: test-with-newest

test-with-%: $(VENV)/.installed
	$(BIN)/python -m venv '.venvs/$*'
	'.venvs/$*/bin/pip' --disable-pip-version-check -q install --upgrade $(if $(filter newest,$*),$(NEWEST_TORCH),'$*') \
	    $$($(BIN)/python -c 'import tomllib; \
	    extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	    print(*extras["test"], *extras["examples"])')
	PYTHONPATH=$(CURDIR) '.venvs/$*/bin/python' -m pytest $(TORCH_TESTED)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/step.py

# What codespell reads, with the words in pyproject.toml; both checks of prose need no network.
PROSE := $(wildcard *.md) docs benchmarks/README.md fused_optim csrc examples

lint: $(VENV)/.lint $(VENV)/.torch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	$(BIN)/codespell $(PROSE)
	$(BIN)/python .ci/check_prose.py

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_SOURCES)

# What docs/ and the README link to, where it lies as in the repository: mkdocs.yml says why.
PAGES := $(wildcard *.md) LICENSE CITATION.cff setup.py docs benchmarks csrc examples fused_optim tests

docs: $(VENV)/.docs
	mkdir -p build/pages
	ln -sfn $(PAGES:%=../../%) build/pages/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Layout, links and searches in Chromium (apt-get install chromium), from the disk; screenshots in build/screenshots.
docs-check: docs
	$(BIN)/python .ci/check_site.py build/site build/screenshots

# The sdist and wheels in dist/, built from the sdist, so that this holds all that is needed: `wheel` for the Python of
# VENV, `wheels` for each that is here. Without FUSED_OPTIM_CUDA_ARCHS=all they are a trial.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14

wheel: PYTHONS := $(abspath $(BIN))/python
wheel wheels: $(VENV)/.release
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python .ci/build_wheels.py dist $(PYTHONS)
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/check_dist.py contents dist

# The wheel of PYTHON under each torch, without this tree: in an empty folder with torch alone and where no program is
# found, no compiler either; then tests of the sdist
# (WHEEL_TESTS=tests: all of them).
WHEEL_TORCHES ?= torch==2.11.0 torch==2.13.0 torch==2.15.0
WHEEL_TESTS ?= tests/engines/test_build.py tests/engines/test_formats.py tests/step/test_optimizer.py tests/step/test_bad_input.py

WHEEL = dist/*-$$($(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl
BARE = env -i HOME=$(CURDIR)/build/$@ PATH=$(CURDIR)/build/$@/venv/bin

wheel-test: $(WHEEL_TORCHES:%=wheel-test-%)

wheel-test-%:
	rm -rf build/$@ && mkdir -p build/$@/empty && $(PYTHON) -m venv build/$@/venv
	build/$@/venv/bin/pip install -q '$*'
	$(BARE) pip install -q $(WHEEL)
	cd build/$@/empty && $(BARE) python $(CURDIR)/.ci/check_dist.py smoke
	build/$@/venv/bin/pip install -q '$*' "$$(echo $(WHEEL))[test]"
	tar -xzf dist/*.tar.gz -C build/$@ --strip-components=1 && rm -r build/$@/fused_optim
	cd build/$@ && venv/bin/python -m pytest -q $(WHEEL_TESTS)

# All that a release must pass; hours on a small machine, most of it for the tests. Needs nvcc, not a GPU.
release-check: export FUSED_OPTIM_CUDA_ARCHS := all
release-check: export FUSED_OPTIM_REQUIRE := cpu,cuda
release-check: lint test test-long docs wheel
	$(MAKE) wheel-test

# That TAG is the version's, in the form that pyproject.toml gives it.
check-tag:
	$(PYTHON) .ci/check_tag.py '$(TAG)'

clean:
	rm -rf build dist *.egg-info demo_output .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f fused_optim/*.so fused_optim/_build_info.json $(VENV)/.installed $(VENV)/.integrations
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './.venvs/*' -prune -exec rm -rf {} +

# The build is isolated, hence independent of the torch beside it. The last line shows which engines were built.
$(VENV)/.installed: $(VENV)/.torch $(ENGINE_SOURCES) setup.py pyproject.toml
	$(PIP) install -e '.[test,examples]'
	@cat fused_optim/_build_info.json
	@touch $@

# Nothing is built again, and the torch that is there stays. Builds of torch for CPUs come without triton.
$(VENV)/.integrations: pyproject.toml $(VENV)/.torch
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch", version("torch"), sep="==")' > $(VENV)/torch-constraint.txt
	$(PIP) install -c $(VENV)/torch-constraint.txt $$($(BIN)/python -c 'import tomllib; \
	    extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	    print(*extras["megatron-core"], *extras["megatron-fsdp"], *extras["frameworks"])')
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) install triton
	@touch $@

# The tools, as pinned in pyproject.toml, and what the examples import, whose types mypy reads: checking the sources must
# not depend on whether they compile.
$(VENV)/.lint: pyproject.toml | $(BIN)/pip
	$(PIP) install $$($(BIN)/python -c 'import tomllib; \
	    extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	    print(*extras["lint"], *extras["examples"])')
	@touch $@

$(VENV)/.docs $(VENV)/.release: $(VENV)/.%: pyproject.toml | $(BIN)/pip
	$(PIP) install $$($(BIN)/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"])')
	@touch $@

# Holds what was installed, and gets newer only when TORCH asks for something else. First and alone, so that the choice
# of a build of torch is TORCH's and not the dependency resolver's.
$(VENV)/.torch: FORCE | $(BIN)/pip
	@echo '$(TORCH)' | cmp -s - $@ || { echo 'installing $(TORCH)'; $(PIP) install $(TORCH:%='%') && echo '$(TORCH)' > $@; }

# Its pip, not its python: a venv that failed for lack of ensurepip has the latter.
$(BIN)/pip:
	@$(PYTHON) -m venv $(VENV) || { echo "error: '$(PYTHON) -m venv' failed: on Debian and Ubuntu it needs the package" \
	    "python3-venv; or set PYTHON to another Python (3.11 or newer)" >&2; exit 1; }
