# make             builds train_gpt_cpu, and says what it leaves out and why
# make setup       installs what is missing (Debian, Ubuntu: packages; Python: .venv); OFFLINE=DIR: from there
# make test        every test but the long ones (make test-long: those, too)
# make demo        two workers train a GPT on real text
# make train_gpt   the CUDA trainer: GPU_ARCH="80 90" for other GPUs than this machine's, PRECISION=FP32
#                  for parameters and activations in fp32 instead of bf16
# make simulate    the paper's Table 4 and figure 4, simulated (dev/tools/simulate.py --help: any model, any run)
# make bench-cpu   speed on this CPU (PEERS=1: and PyTorch's; ARGUMENTS=--quick: a trial)
# make bench-gpu   speed on this machine's GPU (PARTS="d12 layers": only these)
# make bench-formats        what the wire formats lose, and their speed (DELTAS="BEFORE.bin AFTER.bin")
# make bench-wire-quality   what they cost in validation loss: 40 minutes (Xeon) to three hours (EPYC)
# make bench-quality        what distant workers cost in validation loss: ten hours
# make bench-wan            how much of its speed a run keeps over slow lines (root): 63 runs
# make bench-uneven         workers that are slower, lost or far from their store (root)
#                  These four can be interrupted and resumed, and stop by themselves after 40 to 120 minutes
#                  (ARGUMENTS="--minutes 60"): the same command continues. --quick: a trial of each in minutes,
#                  whose report is build/NAME.md, not dev/results/NAME.md; REPORT=FILE: elsewhere.
# make clean       removes what was built; make clean-runs: the unfinished runs from which benchmarks resume
# Developers' targets (emulated kernels, sanitizers, fuzzing, chaos, mutation, ...) are in dev/dev.mk.
CXX = g++
SHELL = /bin/bash
.DEFAULT_GOAL := all
JOBS ?= $(shell nproc)
include scripts/libraries.mk

# No warnings with g++ 12 and nvcc 13; another compiler may have some. They are errors only in CI.
WARNINGS = -Wall -Wextra $(if $(CI),-Werror)
CUDA_WARNINGS = -Xcompiler -Wall$(comma)-Wextra$(comma)-Wno-unknown-pragmas $(if $(CI),-Werror all-warnings)
# -ffp-contract=off: arithmetic that must give the same bits on every machine calls fmaf explicitly.
OPTIMIZE_CPU = -O3 -g1 $(WIDEST_VECTORS)
CXXFLAGS = -std=c++17 $(OPTIMIZE_CPU) -march=$(CPU_ARCH) -fopenmp -ffp-contract=off -fno-math-errno \
           -fno-trapping-math -fno-strict-aliasing $(WARNINGS) -I. $(DEPS_FLAGS) $(WITHOUT)
LDLIBS = $(DEPS_LINK) -ldnnl $(OPTIONAL_LIBS) -lxxhash -lpthread
HEADERS = $(wildcard llmc/*.h llmc/*/*.h llmc/*/*.cuh streaming/*.h streaming/*.cuh streaming/*/*.h)

all: train_gpt_cpu
	@echo "built train_gpt_cpu (this machine's CPU: oneDNN$(if $(HAS_HIREDIS),$(comma) Redis)$(if $(HAS_CURL),$(comma) S3))"
	@echo "make train_gpt builds the CUDA trainer$(if $(NVCC),, (no nvcc found: set CUDA_HOME))"

# The trainer is one .cu file for CPU and GPU: here g++ compiles it as C++.
train_gpt_cpu: train_gpt.cu $(HEADERS) Makefile build/options_cpu | dependencies
	@$(if $(and $(HAS_HIREDIS),$(HAS_OPENSSL),$(HAS_PCRE2),$(HAS_CURL)),,$(say_what_is_left_out))
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

CUDA_FLAGS = -std=c++17 -O3 -I. -DUSE_CUDA $(CUDA_WARNINGS) $(DEPS_FLAGS)
GPU_HOST = -Xcompiler -march=$(CPU_ARCH),-fopenmp,-ffp-contract=off,-fno-strict-aliasing,-fno-math-errno,$\
           -fno-trapping-math $(GPU_FLAGS) $(WITHOUT)
GPU_LIBS = $(GPU_LINK) $(DEPS_LINK) -lcublasLt $(NCCL_LINK) $(OPTIONAL_LIBS) -lxxhash -lpthread
PRECISION ?= BF16
PRECISION_FLAGS = $(if $(filter-out BF16 FP32,$(PRECISION)),\
                    $(error there is no PRECISION=$(PRECISION): give BF16 or FP32),\
                    $(if $(filter FP32,$(PRECISION)),-DENABLE_FP32))
train_gpt test_gpt: %: %.cu train_gpt.cu $(HEADERS) Makefile build/options_gpu | gpu_dependencies
	@$(say_what_is_left_out)
	$(GPU_COMPILER) $(CUDA_FLAGS) $(PRECISION_FLAGS) $(GPU_CODE) $(GPU_HOST) $< -o $@ $(GPU_LIBS)

# These files hold the last build's options and change with them, so that other options build anew.
build/options_cpu: OPTIONS = $(CXX) $(CXXFLAGS) $(LDLIBS)
build/options_gpu: OPTIONS = $(NVCC) $(CUDA_FLAGS) $(PRECISION_FLAGS) $(GPU_CODE) $(GPU_HOST) $(GPU_LIBS)
build/options_cpu: always | dependencies
build/options_gpu: always | gpu_dependencies
build/options_cpu build/options_gpu build/options_unit:
	@mkdir -p build
	@echo "$(OPTIONS)" | cmp -s - $@ || echo "$(OPTIONS)" >$@

setup:
	@CUDA_HOME="$(CUDA_HOME)" $(if $(DEPS_HOME),SKIP_PACKAGES=1) bash scripts/setup.sh \
	    $(if $(OFFLINE),--offline "$(OFFLINE)" $(if $(DEPS_HOME),--prefix "$(DEPS_HOME)"))

demo: setup
	$(MAKE) train_gpt_cpu
	bash scripts/demo.sh

simulate: setup
	.venv/bin/python dev/tools/simulate.py --paper
	@mkdir -p build
	.venv/bin/python dev/tools/simulate.py --plot build/simulated.png

include dev/dev.mk

# PEERS=1 installs PyTorch into an environment of its own (a few GB) and runs it on the same model.
bench-cpu: setup
	$(MAKE) train_gpt_cpu build/matmul_rate $(if $(PEERS),.venv-peers/done)
	.venv/bin/python dev/bench/bench_cpu.py --report $(REPORT) $(if $(PEERS),--pytorch .venv-peers/bin/python) \
	    $(ARGUMENTS)

# PARTS="d12 layers": only these (dev/bench/bench_gpu.py says which there are). PEER: a Python with PyTorch.
PEER ?= python3
bench-gpu:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "error: there is no GPU here: run it where one is" >&2; exit 2; }
	$(MAKE) train_gpt build/gpu/bench_gpu
	python3 dev/bench/bench_gpu.py --peer-python $(PEER) $(PARTS)

# The deltas are what 60 inner steps change: two model files of any run, or of a small one that is made here.
RECORDED = build/deltas/model_00000060.bin build/deltas/model_00000120.bin
DELTAS ?= $(RECORDED)
bench-formats: setup
	$(MAKE) build/bench_formats $(if $(filter $(RECORDED),$(DELTAS)),build/deltas/model_00000120.bin)
	build/bench_formats $(DELTAS)

# ARGUMENTS="--minutes 30", "--quick", "--only ...": see dev/bench/quality.py --help, and so on
REPORT ?= $(if $(findstring --quick,$(ARGUMENTS)),build,dev/results)/$(subst -,_,$(@:bench-%=%)).md
bench-wire-quality bench-quality bench-wan bench-uneven: bench-%:
	@$(if $(filter wan uneven,$*),python3 dev/wan/sites.py)
	$(MAKE) setup
	$(MAKE) train_gpt_cpu $(if $(filter wan uneven,$*),build/relay)
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/$(subst -,_,$*)/text
	.venv/bin/python dev/bench/$(subst -,_,$*).py --report $(REPORT) $(ARGUMENTS)

# Hours of a benchmark that was interrupted may lie here.
RUNS = $(wildcard $(addprefix build/,quality wan wire_quality uneven peer_losses peers))
clean:
	rm -rf $(filter-out $(RUNS),$(wildcard build/*)) train_gpt train_gpt_cpu train_gpt_emulated test_gpt test_gpt_cpu
	$(if $(RUNS),@echo "kept for benchmarks to continue from: $(RUNS) (make clean-runs removes them)")

clean-runs:
	rm -rf $(RUNS)

.PHONY: all always setup demo simulate bench-cpu bench-gpu bench-formats bench-wire-quality bench-quality \
        bench-wan bench-uneven clean clean-runs
