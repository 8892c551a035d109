# make          builds what this machine can build, and says what it cannot and why
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

# The trainer is one .cu file for CPU and GPU: here g++ takes it as C++.
train_gpt_cpu: train_gpt.cu $(HEADERS)
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

test_gpt_cpu: test_gpt.cu train_gpt.cu $(HEADERS) dev/test/reference.h
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

build/%.o: dev/test/%.cpp $(HEADERS) $(wildcard dev/test/*.h)
	@mkdir -p build
	$(CXX) $(CXXFLAGS) -c $< -o $@

build/unit_tests: $(UNIT_TESTS)
	$(CXX) $(CXXFLAGS) $^ -o $@ -lgtest_main -lgtest $(LDLIBS)

build/bench_cpu: dev/bench/bench_cpu.cpp train_gpt.cu $(HEADERS)
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

# PEERS=1 installs PyTorch into .venv if it is not there (a few GB) and runs it on the same model.
bench-cpu: setup
	$(MAKE) build/bench_cpu
	set -o pipefail; build/bench_cpu | tee build/bench_cpu.txt
	@if [ -n "$(PEERS)" ]; then \
	    .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/pip install -q torch; \
	    .venv/bin/python dev/bench/peer_pytorch.py --ours build/bench_cpu.txt; \
	fi

clean:
	rm -rf build train_gpt_cpu test_gpt_cpu

.PHONY: all setup test demo bench-cpu clean
