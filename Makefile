# Every target creates what it needs in .venv; nothing is installed outside this folder.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
CODE := eyas gateway prefill_svc decode_svc draft_svc kv_transfer protos tests tools
PEERS := vllm==0.33.0 sglang==0.5.23
SHAPE := $(addprefix tests/unit/test_,architecture.py shape.py docs_name_what_exists.py protos.py protos_fresh.py)

# Where a system forbids it, each process that a test starts compiles all of Eyas once more.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo serve test test-slow test-gpu check lossless chaos two-hosts containers bench peers protos

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/eyas demo

serve: $(STAMP)
	@exec $(BIN)/eyas serve

# Four at a time on two cores: a test waits half of its time. Compiled before, or each of the four would do
# that. What fails beside neighbours runs once more, alone, and says in detail why: a busy machine may be slower
# than a test allows, a defect fails twice.
test: $(STAMP)
	@$(BIN)/python -m compileall -q -j 0 $(CODE)
	@$(BIN)/python -m pytest -n 4 --assert=plain $(SHAPE:%=--ignore=%) || { [ $$? -eq 1 ] && \
	echo "Once more, alone:" && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(SHAPE:%=--ignore=%); }

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest $(SHAPE)
	$(BIN)/python -m tests.counted

test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -s

lossless: $(STAMP)
	$(BIN)/python -m tests.e2e.lossless

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos

two-hosts: $(STAMP)  # network namespaces: needs root and iproute2
	$(BIN)/python -m tests.e2e.two_hosts

containers: $(STAMP)  # the images and the compose cluster: needs root and podman
	$(BIN)/python -m tests.e2e.containers

bench: $(STAMP)
	$(BIN)/eyas bench suite --report docs/benchmarks.md

peers: $(STAMP)  # on a GPU, beside other servers: each in an environment of its own, the same requests for all
	@for peer in $(PEERS); do name=$${peer%%==*}; \
	  test -x .peers/$$name/bin/python || $(PYTHON) -m venv .peers/$$name; \
	  .peers/$$name/bin/pip install --quiet $$peer || exit 1; done
	$(BIN)/python -m tools.bench.peers

protos: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto
