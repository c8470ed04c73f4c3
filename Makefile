# The front door: every target first sets up what is missing and says so. `make` alone prints what there is.
BUILD := build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BENCH ?= all
RANKS ?= 2
MINUTES ?= 30
export CMAKE_COLOR_DIAGNOSTICS := ON

.DEFAULT_GOAL := help
.PHONY: help setup setup-bench configure demo test soak bench format docs clean

help:
	@echo 'make demo          build, check every collective, print bandwidths beside Gloo, train a GPT; RANKS=2 train it'
	@echo 'make test          build everything and run all tests'
	@echo 'make soak          run random programs beside plain LibTorch for MINUTES=$(MINUTES), split evenly over their kinds'
	@echo 'make bench         run every benchmark beside its reference; one of them: make bench BENCH=ddp'
	@echo 'make format        format all sources in place'
	@echo 'make docs          check the links, tables and code blocks of README and docs'
	@echo 'make clean         remove the build; what the set-up has installed in $(BUILD)/deps stays'
	@echo 'Variables: JOBS=$(JOBS) (parallel compilers), Torch_DIR or CMAKE_PREFIX_PATH (a LibTorch 2.13 of yours)'

setup:
	@scripts/setup.sh

setup-bench:
	@scripts/setup.sh bench

# Ninja runs CMake again by itself, so it is called only for a new build folder or another LibTorch.
CONFIGURED = grep -qsxF "Torch_DIR:PATH=$$(cat $(BUILD)/deps/torch_dir)" $(BUILD)/CMakeCache.txt && test -e $(BUILD)/build.ninja
CONFIGURE = cmake --preset $(1) -DTorch_DIR="$$(cat $(BUILD)/deps/torch_dir)"

configure: setup
	@$(CONFIGURED) || $(call CONFIGURE,default)

demo: configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_demo serried_cli 06_gpt
	@$(BUILD)/bin/serried run -n 4 $(BUILD)/bin/serried_demo
	@$(BUILD)/bin/serried run -n $(RANKS) $(BUILD)/bin/06_gpt --trace $(BUILD)/gpt_trace.json
	@echo 'Next: docs/quickstart.md, a training program of your own in five minutes.'

test: configure
	@cmake --build $(BUILD) -j $(JOBS)
	@ctest --test-dir $(BUILD) -j 2 --output-on-failure

soak: configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_random_tests
	@scripts/soak.py $(BUILD)/tests/serried_random_tests --minutes $(MINUTES)

bench: setup-bench
	@$(call CONFIGURE,bench)
	@cmake --build $(BUILD) -j $(JOBS) --target serried_bench serried_cli
	@benchmarks/run.sh $(BUILD) $(BENCH)

format: setup
	@scripts/format.sh

docs: configure
	@scripts/check_docs.py links
	@scripts/check_parity.py
	@cmake --build $(BUILD) -j $(JOBS) --target serried_docs

clean:
	@find $(BUILD) -mindepth 1 -maxdepth 1 ! -name deps -exec rm -rf {} + 2>/dev/null || true
