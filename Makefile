# make          builds train_gpt_cpu, and says what it does not build and why
# make setup    installs what is missing (Debian, Ubuntu: packages; Python: .venv)
# make test     every test                         make demo   two workers train a GPT on real text
# make bench-cpu   speed on this CPU (PEERS=1: and PyTorch's)
CXX = g++
SHELL = /bin/bash
# -ffp-contract=off: arithmetic that must give the same bits on every machine says fmaf where it means it.
CXXFLAGS = -std=c++17 -O3 -march=native -g1 -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math \
           -fno-strict-aliasing -Wall -Wextra -Werror -I.
LDLIBS = -ldnnl -lgloo -lhiredis -lxxhash -lpthread
HEADERS = $(wildcard llmc/*.h llmc/cpu/*.h streaming/*.h)
UNIT_TESTS = $(patsubst dev/test/%.cpp,build/%.o,$(wildcard dev/test/test_*.cpp))

all: train_gpt_cpu
	@echo "built train_gpt_cpu (this machine's CPU: oneDNN, Gloo, Redis)"
	@echo "not built: train_gpt, the CUDA trainer: this version of the program runs on CPUs only"

# One line for what is missing, instead of a compiler's many.
dependencies:
	@for header in dnnl.hpp gloo/transport/tcp/device.h hiredis/hiredis.h CLI/CLI.hpp xxhash.h; do \
	    printf '#if !__has_include(<%s>)\n#error\n#endif\n' $$header | $(CXX) -E -x c++ - >/dev/null 2>&1 || \
	    { echo "error: $$header is not installed: run make setup" >&2; exit 2; }; \
	done

# The trainer is one .cu file for CPU and GPU: here g++ takes it as C++.
train_gpt_cpu: train_gpt.cu $(HEADERS) Makefile | dependencies
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

test_gpt_cpu: test_gpt.cu train_gpt.cu $(HEADERS) dev/test/reference.h Makefile | dependencies
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

build/%.o: dev/test/%.cpp $(HEADERS) $(wildcard dev/test/*.h) Makefile | dependencies
	@mkdir -p build
	$(CXX) $(CXXFLAGS) -c $< -o $@

build/unit_tests: $(UNIT_TESTS)
	$(CXX) $(CXXFLAGS) $^ -o $@ -lgtest_main -lgtest $(LDLIBS)

build/bench_cpu: dev/bench/bench_cpu.cpp train_gpt.cu $(HEADERS) Makefile | dependencies
	@mkdir -p build
	$(CXX) $(CXXFLAGS) $< -o $@ $(LDLIBS)

setup:
	@bash scripts/setup.sh

# pytest runs everything, the GoogleTest binary and test_gpt_cpu included, so that one line counts all of it.
test: setup
	$(MAKE) -j2 train_gpt_cpu test_gpt_cpu build/unit_tests
	.venv/bin/python -m pytest -q dev/test

demo: setup
	$(MAKE) train_gpt_cpu
	bash scripts/demo.sh

# PEERS=1 installs PyTorch into an environment of its own (a few GB) and runs it on the same model.
bench-cpu: setup
	$(MAKE) build/bench_cpu
	set -o pipefail; build/bench_cpu | tee build/bench_cpu.txt
	@if [ -n "$(PEERS)" ]; then \
	    { [ -e .venv-peers/done ] || { python3 -m venv .venv-peers && \
	      .venv-peers/bin/pip install -q -r requirements-peers.txt && touch .venv-peers/done; }; } && \
	    .venv-peers/bin/python dev/bench/peer_pytorch.py --ours build/bench_cpu.txt; \
	fi

clean:
	rm -rf build train_gpt_cpu test_gpt_cpu

.PHONY: all dependencies setup test demo bench-cpu clean
