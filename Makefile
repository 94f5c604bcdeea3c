# Needs python3 >= 3.11, pip and make; everything else goes into .venv.
#
#   make serve [MODEL=<hub id or folder>] [ARGS="--port 9000 ..."]   the bundled demo model without MODEL
#   make test [ARGS=tests/server/api/openai/test_chat.py] | test-wide | test-slow | test-architectures | test-media-architectures | test-thresholds | test-capture | check | bench | bench-tiers | setup | pins
#   make test-cuda | bench-gpu   on a machine with a GPU; with INSTALLED=1 in PYTHON as it is, without a network: it needs
#                                torch, transformers, msgspec, pyzmq, llguidance, xxhash and pytest
#   make test-clients [ARGS="-k langchain"]   the clients that people use, in .venv-clients
#   make test-agents [ARGS="-k claude"]   coding agents as they are installed, from npm and pip, in .agents; needs node 20
#   make test-speculation [TURNS=10000] [SEED=1]   the same replies with drafted tokens and without; half an hour
#   make test-fuzz [REQUESTS=20000] | bench-overload | bench-speculation | bench-adapters | bench-page | pages
#   make image-check [WORK=<folder>] [ARGS="--bind ..."]   the container image, built and tried without an engine
#   make test-crash [KILLS=200] [EVERY=1] [DAMAGES=1000]   an hour or two; EVERY=10 tries a tenth of the crash points

PYTHON ?= python3
TORCH := 2.13.0
TORCH_INDEX ?=
INSTALLED ?=
MODEL ?=
ARGS ?=

# Compiled files of Python are kept, whatever the shell says: each test that starts a server reads them.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
CLIENTS := .venv-clients/bin
CLIENTS_STAMP := .venv-clients/.installed
AGENTS_STAMP := .agents/.installed
# What the GPU's targets run in, and what that must have gone through before.
GPU_PYTHON := $(if $(INSTALLED),$(PYTHON),$(BIN)/python)
FOR_GPU := $(if $(INSTALLED),,$(DEV_STAMP))
# An index that is named takes part beside the configured ones; the version is exact either way.
TORCH_FROM := $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')

.PHONY: serve setup test test-wide test-slow test-cuda test-crash test-architectures test-media-architectures test-thresholds test-capture test-speculation check bench bench-tiers bench-gpu pins test-clients test-agents test-fuzz bench-overload bench-models bench-speculation bench-adapters bench-page pages image-check clean

serve: $(STAMP)
	@$(BIN)/warmturn serve $(if $(MODEL),'$(MODEL)') $(ARGS)

setup: $(DEV_STAMP)

# A worker more than there are cores, as many tests wait for processes; a file to a worker.
# ARGS=tests/server/api/openai/test_chat.py for one file, with what of it is wide.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(DEV_STAMP)
	$(BIN)/python -m pytest -m "not slow$(if $(ARGS),, and not wide)" $(IN_PARALLEL) $(ARGS)

# The other half: further models, colours and languages of what `make test` runs with one of each kind, all of the page,
# and most of what starts whole servers and clusters. THIRD=1, 2 or 3 for a third of the files.
test-wide: $(DEV_STAMP)
	TESTS_THIRD=$(THIRD) $(BIN)/python -m pytest -m "wide and not slow" $(IN_PARALLEL) $(ARGS)

test-slow: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow --ignore=tests/crash --ignore=tests/agents

# No conftest, as that needs PostgreSQL's client; warnings of other versions of packages are not ours to mend.
test-cuda: $(FOR_GPU)
	$(GPU_PYTHON) -m pytest -rs -W default --noconftest tests/test_cuda.py

# kill -9, crash points, damaged files and races, against real servers; the sweep needs strace.
test-crash: $(DEV_STAMP)
	CRASH_KILLS=$(or $(KILLS),200) CRASH_EVERY=$(or $(EVERY),1) CRASH_DAMAGES=$(or $(DAMAGES),1000) \
	  $(BIN)/python -m pytest -s -m slow tests/crash

# Every architecture of transformers as a tiny random model, about ten minutes; writes docs/architectures.md.
test-architectures: $(DEV_STAMP)
	$(BIN)/python tests/architectures/run.py --jobs 2 --out docs/architectures.md

# Those that take pictures or sounds, in chats that have some; writes docs/media_architectures.md.
test-media-architectures: $(DEV_STAMP)
	$(BIN)/python tests/architectures/run.py --kind media --jobs 2 --timeout 600 --out docs/media_architectures.md

# The same with the real thresholds of each, about an hour of two cores; the second part of that page.
test-thresholds: $(DEV_STAMP)
	$(BIN)/python tests/architectures/run.py --real --jobs 2 --timeout 900 --out docs/architectures.md

# Whose decode steps can be captured as CUDA graphs, found on a CPU in two minutes; writes docs/captured.md.
test-capture: $(DEV_STAMP)
	$(BIN)/python tests/architectures/capture.py --out docs/captured.md

# Turns of all sorts on 16 architectures, on an engine that drafts tokens and on one that does not.
test-speculation: $(DEV_STAMP)
	SPECULATION_TURNS=$(or $(TURNS),10000) SPECULATION_SEED=$(or $(SEED),1) \
	  $(BIN)/python -m pytest -s -m slow -n $(WORKERS) --dist load tests/scheduler/core/test_speculation.py

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

# OpenAI's, Anthropic's and Ollama's clients, LangChain, LiteLLM, instructor and lm-eval against a real server, about six minutes.
test-clients: $(STAMP) $(CLIENTS_STAMP)
	SERVER_PYTHON='$(abspath $(BIN)/python)' $(CLIENTS)/python -m pytest -c tests/clients/clients.ini tests/clients $(ARGS)

# Claude Code, Codex, OpenCode, Qwen Code, pi, aider, Goose, Continue, Cline, LibreChat against a server with a scripted model,
# about twenty minutes.
# AGENTS_RECORD=1 writes their requests to tests/agents/recordings anew; AGENTS_FLAGS are further flags of the server.
test-agents: $(DEV_STAMP) $(AGENTS_STAMP)
	$(BIN)/python -m pytest -m slow tests/agents $(ARGS)

bench: $(STAMP)
	@$(BIN)/warmturn bench $(if $(MODEL),'$(MODEL)') $(ARGS)

# About twenty minutes; ARGS="turn written" measures only these. See tools/bench_tiers.py.
bench-tiers: $(DEV_STAMP)
	$(BIN)/python -m tools.bench_tiers $(ARGS)

# Within ten minutes on a GPU; ARGS="--tiny" tries it on whatever is there. See tools/bench_gpu.py.
bench-gpu: $(FOR_GPU)
	$(GPU_PYTHON) -m tools.bench_gpu $(ARGS)

# Random requests to every route, made by schemathesis; half an hour for 20,000.
test-fuzz: $(DEV_STAMP)
	$(PIP) install -q -c constraints.txt -e '.[fuzz]'
	PYTHONPATH=tests $(BIN)/python -m tools.fuzz --requests $(or $(REQUESTS),20000)

# Ten times more load than the server can serve; about four minutes.
bench-overload: $(DEV_STAMP)
	$(BIN)/python -m tools.overload $(ARGS)

# Three models on one port with two loaded, 200 turns in random order, one engine killed; about ten minutes.
bench-models: $(DEV_STAMP)
	$(BIN)/python -m tools.bench_models $(ARGS)

# Speculation on and off, by turns, on texts that repeat and texts that do not: half an hour; ARGS="--only a --sessions 1".
bench-speculation: $(DEV_STAMP)
	$(BIN)/python -m tools.bench_speculation $(ARGS)

# What LoRA adapters cost beside the base alone, a few minutes.
bench-adapters: $(DEV_STAMP)
	$(BIN)/python -m tools.bench_adapters $(ARGS)

# The page in Chromium: loading, a long reply, a long conversation, a long list; half an hour. ARGS="--only load".
bench-page: $(DEV_STAMP)
	$(BIN)/python -m tools.bench_page $(ARGS)

# Writes docs/api.md and docs/modules.md anew from the code.
pages: $(DEV_STAMP)
	for page in api modules; do \
	  $(BIN)/python -m tools.$${page}_page > docs/$$page.md.new && mv docs/$$page.md.new docs/$$page.md || exit 1; \
	done

# Writes constraints.txt anew from what is installed in .venv.
pins: $(DEV_STAMP)
	$(BIN)/python tools/pins.py > constraints.txt.new
	mv constraints.txt.new constraints.txt

# The Dockerfile's steps without a container engine, and the image tried; Linux, as root, with debootstrap. About four
# minutes, and 4 GB in WORK; ARGS="--bind ..." for indexes that are folders of this machine.
image-check: $(DEV_STAMP)
	$(BIN)/python -m deploy.check_image --work '$(or $(WORK),/var/tmp/warmturn-image)' $(ARGS)

clean:
	rm -rf .venv .venv-clients .agents .pytest_cache .mypy_cache .ruff_cache build dist

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "warmturn needs Python 3.11 or newer as $(PYTHON); name another one with make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch $(TORCH) and then the server into .venv: a minute or two, and nothing is said meanwhile"
	@if nvidia-smi >/dev/null 2>&1; then \
	  echo "torch $(TORCH): a GPU is there, taking the CUDA build"; \
	  $(PIP) install -c constraints.txt $(TORCH_FROM) torch==$(TORCH); \
	else \
	  echo "torch $(TORCH): no GPU, looking for the CPU build"; \
	  $(PIP) install -q -c constraints.txt $(TORCH_FROM) torch==$(TORCH)+cpu 2>/dev/null || { \
	    echo "torch $(TORCH): no index has a CPU build by name (TORCH_INDEX can name one), taking the plain one"; \
	    $(PIP) install -c constraints.txt torch==$(TORCH); \
	  }; \
	fi
	@echo "installing the server's packages"
	@$(PIP) install -q -c constraints.txt -e .
	@echo "compiling for this processor"
	@$(BIN)/python -m cache.attention.cpu || true
	@$(BIN)/python -m scheduler.accel.cpu.program_kernel || true
	@touch $(STAMP)

# What tests, linters and their clients need, beside what serves.
$(DEV_STAMP): $(STAMP)
	@echo "installing what tests and checks need: half a minute"
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $(DEV_STAMP)

# instructor wants an older jiter than openai does, and works with the newer one.
$(CLIENTS_STAMP): pyproject.toml constraints-clients.txt
	@test -x $(CLIENTS)/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS)/python -m pip install -q -c constraints-clients.txt 'pip>=25.1'
	$(CLIENTS)/python -m pip install -q -c constraints-clients.txt --group clients
	$(CLIENTS)/python -m pip install -q -c constraints-clients.txt --no-deps instructor
	@touch $(CLIENTS_STAMP)

# `npm ci` would want the packages of every platform in the lock. npm runs no scripts of packages here: those that
# put a program of this platform in its place are run by name.
$(AGENTS_STAMP): tests/agents/package.json tests/agents/package-lock.json constraints-agents.txt tests/agents/librechat/package-lock.json
	@command -v npm >/dev/null || { echo "make test-agents needs node 20 or newer, with npm" >&2; exit 1; }
	mkdir -p .agents
	cp tests/agents/package.json tests/agents/package-lock.json .agents/
	cd .agents && npm install --no-save --no-audit --no-fund --ignore-scripts
	mkdir -p .agents/librechat
	cp tests/agents/librechat/package.json tests/agents/librechat/package-lock.json .agents/librechat/
	cd .agents/librechat && npm install --no-save --no-audit --no-fund --ignore-scripts
	cd .agents && node node_modules/@anthropic-ai/claude-code/install.cjs
	cd .agents && node node_modules/opencode-ai/postinstall.mjs
	test -x .agents/venv/bin/python || $(PYTHON) -m venv .agents/venv
	.agents/venv/bin/python -m pip install -q -c constraints-agents.txt aider-chat
	@touch $(AGENTS_STAMP)
