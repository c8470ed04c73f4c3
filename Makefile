# The front door: every target first sets up what is missing and says so. `make` alone prints what there is.
BUILD := build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BENCH ?= all
# The demo trains on 2 ranks, to leave a core free on small machines; most examples want 4.
RANKS ?= $(if $(filter run,$(MAKECMDGOALS)),4,2)
EXAMPLE ?= 06_gpt
MINUTES ?= 30
SECONDS ?= 300
PREFIX ?= /usr/local
# LAYERS=comm runs base and comm alone under the sanitizers.
LAYERS ?= all
ASAN_TESTS = serried_tests serried_launch_tests \
             $(if $(filter all,$(LAYERS)),serried_spmd_tests serried_tensor_tests serried_parallel_tests serried_graph_tests serried_checkpoint_tests serried_fuzz_tests)
# Those whose ranks are threads.
TSAN_TESTS = serried_tests $(if $(filter all,$(LAYERS)),serried_tensor_tests serried_parallel_tests serried_graph_tests serried_checkpoint_tests)
export CMAKE_COLOR_DIAGNOSTICS := ON

.DEFAULT_GOAL := help
.PHONY: help setup setup-bench setup-fuzz setup-test configure demo run test install package wheel pytorch-suite soak sanitize asan tsan fuzz bench bench-build format docs clean

help:
	@echo 'make demo          build, check every collective, print bandwidths beside Gloo, train a GPT; RANKS=2 train it'
	@echo 'make run           build and start one of examples/: EXAMPLE=$(EXAMPLE) on RANKS=4'
	@echo 'make test          build everything and run all tests'
	@echo 'make install       build what a project of yours needs and install it to PREFIX=$(PREFIX); LIBTORCH=copy adds LibTorch'
	@echo 'make package       make an archive and a Debian package, for machines with a LibTorch of their own, in $(BUILD)/packages'
	@echo 'make wheel         make a wheel of the Python package, for the torch of this build, in $(BUILD)/wheels'
	@echo 'make pytorch-suite run PyTorch'"'"'s own distributed tests, its ops of DTensor and its models under FSDP2 on gloo and on serried, with 2, 3 and 4 ranks'
	@echo 'make soak          run random programs beside plain LibTorch for MINUTES=$(MINUTES), split evenly over their kinds'
	@echo 'make sanitize      run the tests under the address, undefined-behaviour and thread sanitizers; one of them: make asan, make tsan'
	@echo 'make fuzz          give every parser random inputs for SECONDS=$(SECONDS) each; what breaks one is kept in tests/fuzz/found'
	@echo 'make bench         run every benchmark beside its reference; one of them: make bench BENCH=ddp'
	@echo 'make format        format all sources in place'
	@echo 'make docs          check the links, tables and code blocks of README and docs'
	@echo 'make clean         remove the build; what the set-up has installed in $(BUILD)/deps stays'
	@echo 'Variables: JOBS=$(JOBS) (parallel compilers), Torch_DIR or CMAKE_PREFIX_PATH (a LibTorch 2.13 of yours)'

setup:
	@scripts/setup.sh

setup-bench:
	@scripts/setup.sh bench

setup-test:
	@scripts/setup.sh test

setup-fuzz:
	@scripts/setup.sh fuzz

# Ninja runs CMake again by itself, so it is called only for a new build folder or another LibTorch.
CONFIGURED = grep -qsxF "Torch_DIR:PATH=$$(cat $(BUILD)/deps/torch_dir)" $(BUILD)/CMakeCache.txt && test -e $(BUILD)/build.ninja
CONFIGURE = cmake --preset $(1) -DTorch_DIR="$$(cat $(BUILD)/deps/torch_dir)"

configure: setup
	@$(CONFIGURED) || $(call CONFIGURE,default)

demo: configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_demo serried_cli 06_gpt
	@$(BUILD)/bin/serried run -n 4 $(BUILD)/bin/serried_demo
	@$(BUILD)/bin/serried run -n $(RANKS) $(BUILD)/bin/06_gpt --trace $(BUILD)/gpt_trace.json
	@cat examples/demo/next.txt

run: configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_cli $(EXAMPLE)
	@$(BUILD)/bin/serried run -n $(RANKS) $(BUILD)/bin/$(EXAMPLE)

test: setup-test configure
	@cmake --build $(BUILD) -j $(JOBS)
	@ctest --test-dir $(BUILD) -j 2 --output-on-failure

INSTALL_PREFIX = $(patsubst ~/%,$(HOME)/%,$(PREFIX))

install: configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_installed
	@cmake --install $(BUILD) --prefix "$(INSTALL_PREFIX)"
	@$(if $(filter copy,$(LIBTORCH)),cmake --install $(BUILD) --prefix "$(INSTALL_PREFIX)" --component libtorch >/dev/null && echo 'LibTorch is in $(INSTALL_PREFIX)/libtorch')

package: configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_installed
	@cd $(BUILD) && cpack

wheel: configure
	@JOBS=$(JOBS) python3 python/build_backend.py $(BUILD)/wheels

# The torch that the build has found, the package as the build has made it, and what the tests import.
PYTHON_PATH = $(abspath $(BUILD))/python:$$(dirname $$(dirname $$(dirname $$(dirname "$$(cat $(BUILD)/deps/torch_dir)")))):$(abspath $(BUILD))/deps/python

pytorch-suite: setup-test configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_python
	@PYTHONPATH=$(PYTHON_PATH) python3 tests/pytorch/judge.py
	@for ranks in 2 3 4; do PYTHONPATH=$(PYTHON_PATH) python3 tests/pytorch/same_results.py $$ranks || exit 1; done

soak: configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried_random_tests serried_random_faults_tests serried_random_elastic_tests
	@scripts/soak.py $(BUILD)/tests/serried_random_tests $(BUILD)/tests/process/ranks/serried_random_faults_tests $(BUILD)/tests/process/elastic/serried_random_elastic_tests --minutes $(MINUTES)

sanitize: asan tsan

# Each in a build folder of its own; only the programs that are run are built.
SANITIZE = $(call CONFIGURE,$(1)) -DSERRIED_COMM_ONLY=$(if $(filter comm,$(LAYERS)),ON,OFF) && cmake --build $(BUILD)/$(1) -j $(JOBS) --target $(2) && \
           ctest --preset $(1) -L "^($$(echo $(strip $(2)) | tr ' ' '|'))$$"

asan: setup
	@$(call SANITIZE,asan,$(ASAN_TESTS))

tsan: setup
	@$(call SANITIZE,tsan,$(TSAN_TESTS))

fuzz: setup-fuzz configure
	@cmake --build $(BUILD) -j $(JOBS) --target serried
	@cmake -S tests/fuzz/libfuzzer -B $(BUILD)/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DTorch_DIR="$$(cat $(BUILD)/deps/torch_dir)"
	@cmake --build $(BUILD)/fuzz -j $(JOBS)
	@scripts/fuzz.py $(BUILD)/fuzz/serried_fuzz --seconds $(SECONDS) --jobs $(JOBS)

bench-build: setup-bench
	@$(call CONFIGURE,bench)
	@cmake --build $(BUILD) -j $(JOBS) --target serried_bench

bench: bench-build
	@benchmarks/run.sh $(BUILD) $(BENCH)

format: setup
	@scripts/format.sh

docs: configure
	@scripts/check_docs.py links
	@scripts/check_parity.py
	@cmake --build $(BUILD) -j $(JOBS) --target serried_docs serried_installed
	@scripts/docs_programs.py run $(BUILD)/tests/checks/serried_docs $(BUILD)/bin/serried

clean:
	@find $(BUILD) -mindepth 1 -maxdepth 1 ! -name deps -exec rm -rf {} + 2>/dev/null || true
