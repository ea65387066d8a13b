# Everything a person types. `make up` needs Python 3.11 and nothing else: no docker, no root, no GPU.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed
PLOTS := .venv/.plots
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
ARGS ?=
AGREEMENT := tests/unit/replica/agreement

.PHONY: setup models up test agreement clients compose-test check drill sim bench-plane bench-peers bench-engine clean

# The kernels are compiled again only when their sources have changed; without a compiler torch takes their place.
setup: $(INSTALLED)
	@$(BIN)/python -m services.replica.model.native

# Again only when what is installed has changed.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing what Chorus stands on into .venv: some minutes, once"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	touch $@

models: $(MODEL)

# What draws the benches' pictures; nothing else needs it.
$(PLOTS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

$(MODEL): | $(INSTALLED)
	$(BIN)/chorus models fetch

up: setup models
	@$(BIN)/chorus up $(ARGS)

# Two files at a time; ARGS="-n 0" for one.
test: setup models
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# The official clients at pinned versions, in .venvs, and their tests. What cannot be had is named and skipped.
# `make test` installs none of them, and runs those that are there.
clients: setup
	$(BIN)/python -m tests.clients.install
	$(BIN)/python -m pytest tests/clients $(ARGS)

# transformers, in an environment of its own, computes again what our models are compared with; then they are.
agreement: setup models
	test -x .venvs/agreement/bin/python || $(PYTHON) -m venv .venvs/agreement
	.venvs/agreement/bin/python -m pip install --quiet torch==2.13.0 transformers==5.19.0 accelerate safetensors gguf
	.venvs/agreement/bin/python $(AGREEMENT)/make.py golden $(AGREEMENT)
	.venvs/agreement/bin/python $(AGREEMENT)/make.py greedy $(MODEL) $(AGREEMENT)/greedy.json
	CHORUS_AGREEMENT_TOKENS=64 $(BIN)/python -m pytest tests/unit/replica/test_agreement.py tests/integration/test_agreement_real.py

# Needs a docker engine. Where no registry is reached, tests/compose/README.md says how its base images are made.
compose-test: setup
	CHORUS_COMPOSE=1 $(BIN)/python -m pytest tests/compose -n 0 -p no:randomly $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every drill in its full form (an hour or so); figures go to bench/results/drill.json. ARGS: names, --short
drill: setup models
	$(BIN)/python -m tests.drill $(ARGS)

# Takeover worlds on a virtual clock. ARGS: --seeds N, --seed N, --scenario NAME
sim: setup
	$(BIN)/python -m sim $(ARGS)

bench-plane: setup $(PLOTS)
	$(BIN)/python -m bench.plane $(ARGS)

# What can be had of them goes to .venvs; the rest is named as missing.
bench-peers: setup models
	$(BIN)/python -m bench.engine_peers $(ARGS)

bench-engine: setup models $(PLOTS)
	$(BIN)/python -m bench.engine $(ARGS)

# What can be made again. The environment, the model and the data folder stay.
clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
