# make          builds train_gpt_cpu, and says what it does not build and why
# make setup    installs what is missing (Debian, Ubuntu: packages; Python: .venv); OFFLINE=DIR: from there
# make test     every test                         make demo   two workers train a GPT on real text
# make bench-cpu   speed on this CPU (PEERS=1: and PyTorch's)
# make bench-formats   what the wire's formats lose, and their speed (DELTAS="BEFORE.bin AFTER.bin")
# make bench-wire-quality   what they cost in validation loss: 45 runs, about 70 minutes; resumable
# make bench-quality   what DiLoCo and streaming cost in validation loss; resumable, at most two hours
# make bench-wan       what a run keeps of its speed over slow lines (root): 63 runs, resumable; ARGUMENTS=--quick
# make bench-uneven    workers that are slower, lost or far from their store (root): resumable; ARGUMENTS=--quick
# make simulate        the paper's Table 4 and figure 4, simulated (dev/tools/simulate.py --help: any model, any run)
# make test-emulated   CUDA kernels on this CPU, with three kinds of sanitizers (part of make test-long)
# make check-cuda      the same kernels through nvcc, if there is one (part of make test-long)
# make test-gpu        the same tests and more on this machine's GPU       make bench-gpu   its speed
# make train_gpt       the CUDA trainer: GPU_ARCH="80 90" for other GPUs than this machine's, PRECISION=FP32
#                      for parameters and activations in fp32 instead of bf16
# make test-long       make test, and what takes too long for it: kernels under sanitizers and nvcc, too
# make fuzz            each parser of files, payloads and the store under libFuzzer, a minute each (clang)
# make torture         kills a run KILLS=500 times, in the middle of writes too, and compares its bits
# make chaos           workers that come and go are killed, stopped, slowed and cut off for MINUTES=10; SEED=
# make mutate          breaks kernels and host side on purpose: do the tests notice? (MUTATE=--help: options)
# make registers       registers and spills of each kernel, as nvcc reports them
CXX = g++
SHELL = /bin/bash
.DEFAULT_GOAL := all
include scripts/libraries.mk

# Clean with g++ 12 and nvcc 13. Another compiler may warn of more: an error only where changes are checked.
WARNINGS = -Wall -Wextra $(if $(CI),-Werror)
CUDA_WARNINGS = -Xcompiler -Wall$(comma)-Wextra$(comma)-Wno-unknown-pragmas $(if $(CI),-Werror all-warnings)
build/nvcc/%: CI = true
# -ffp-contract=off: arithmetic that must give the same bits on every machine says fmaf where it means it.
CXXFLAGS = -std=c++17 -O3 -march=$(CPU_ARCH) -g1 -fopenmp -ffp-contract=off -fno-math-errno \
           -fno-trapping-math -fno-strict-aliasing $(WARNINGS) -I. $(DEPS_FLAGS) $(WITHOUT)
LDLIBS = $(DEPS_LINK) -ldnnl $(OPTIONAL_LIBS) -lxxhash -lpthread
HEADERS = $(wildcard llmc/*.h llmc/*/*.h streaming/*.h streaming/*/*.h)
UNIT_TESTS = $(patsubst dev/test/%.cpp,build/%.o,$(wildcard dev/test/unit/*/test_*.cpp))

# The emulator compiles kernels with g++ and CUDA's headers: the toolkit's, or those that make setup fetched.
CUDA_HEADER = $(firstword $(wildcard $(CUDA_HOME)/include/cublasLt.h \
                .venv/lib/python3.*/site-packages/nvidia/cu13/include/cuda_fp4.h))
CUDA_HEADERS = $(filter-out /usr/include/,\
                 $(dir $(or $(CUDA_HEADER),$(error no CUDA headers: run make setup))))
EMULATED = -std=c++17 $(OPTIMIZE) -DUSE_CUDA -ffp-contract=off -fno-strict-aliasing $(WARNINGS) \
           -Wno-unknown-pragmas -I. \
           $(addprefix -isystem ,$(CUDA_HEADERS) .venv/cuda) $(DEPS_FLAGS) $(WITHOUT)
EMULATOR_HEADERS = $(HEADERS) Makefile $(wildcard dev/emulator/*.h llmc/*/*.cuh streaming/*.cuh \
                                                  dev/test/kernels/*.h dev/test/*.h dev/test/unit/*.h)
EMULATOR = emulator machine device_memory queue runtime copies streams cublaslt nccl nccl_communicator \
           nccl_operations nccl_peers
KERNEL_SOURCES = $(wildcard dev/emulator/test_*.cpp dev/test/kernels/test_*.cpp)
KERNEL_TESTS = $(notdir $(KERNEL_SOURCES:.cpp=))
# What make test runs of the emulator's; the long tests run the same programs with sanitizers, and in fp32
# (parameters and activations as in a GPU's fp32 build).
PLAIN_TESTS = $(KERNEL_TESTS:%=build/plain/%) build/plain/test_gpt
EMULATOR_TESTS = $(PLAIN_TESTS) $(foreach kind,address thread,$(KERNEL_TESTS:%=build/$(kind)/%)) \
                 $(patsubst dev/test/kernels/%.cpp,build/fp32/%,$(wildcard dev/test/kernels/test_*.cpp)) \
                 build/fp32/test_gpt
EMULATED_TRAINERS = build/plain/train_gpt build/without/train_gpt
LONG_TESTS = $(EMULATOR_TESTS) build/thread/train_gpt build/plain/bench_gpu $(FUZZ_PROGRAMS) check-cuda
vpath test_%.cpp dev/emulator dev/test/kernels
CUDA_FLAGS = -std=c++17 -O3 -I. -DUSE_CUDA $(CUDA_WARNINGS) $(DEPS_FLAGS)
CUDA_TESTS = $(patsubst dev/test/kernels/%.cpp,build/nvcc/%.ptx,$(wildcard dev/test/kernels/test_*.cpp)) \
             build/nvcc/test_kernels.ptx

all: train_gpt_cpu
	@echo "built train_gpt_cpu (this machine's CPU: oneDNN, Gloo$(if $(HAS_HIREDIS),$(comma) Redis))"
	@echo "make train_gpt builds the CUDA trainer$(if $(NVCC),, (no nvcc here: CUDA_HOME says where to look))"

# For this machine's GPU, or for those named (GPU_ARCH="80 90").
GPU_HOST = -Xcompiler -march=$(CPU_ARCH),-fopenmp,-ffp-contract=off,-fno-strict-aliasing,-fno-math-errno,$\
           -fno-trapping-math $(GPU_FLAGS) $(WITHOUT)
GPU_LIBS = $(GPU_LINK) $(DEPS_LINK) -lcublasLt $(NCCL_LINK) $(OPTIONAL_LIBS) -lxxhash -lpthread
PRECISION ?= BF16
PRECISION_FLAGS = $(if $(filter-out BF16 FP32,$(PRECISION)),\
                    $(error PRECISION=$(PRECISION) is not there: BF16 or FP32),\
                    $(if $(filter FP32,$(PRECISION)),-DENABLE_FP32))
train_gpt test_gpt: %: %.cu train_gpt.cu $(EMULATOR_HEADERS) build/options_gpu | gpu_dependencies
	@$(say_what_is_left_out)
	$(GPU_COMPILER) $(CUDA_FLAGS) $(PRECISION_FLAGS) $(GPU_CODE) $(GPU_HOST) $< -o $@ $(GPU_LIBS)

# What is built with other options is built anew. Where something is missing they stay as they were.
build/options_cpu: OPTIONS = $(CXX) $(CXXFLAGS) $(LDLIBS)
build/options_gpu: OPTIONS = $(NVCC) $(CUDA_FLAGS) $(PRECISION_FLAGS) $(GPU_CODE) $(GPU_HOST) $(GPU_LIBS)
build/options_cpu: always | dependencies
build/options_gpu: always | gpu_dependencies
build/options_cpu build/options_gpu:
	@mkdir -p build
	@echo "$(OPTIONS)" | cmp -s - $@ || echo "$(OPTIONS)" >$@

# The trainer is one .cu file for CPU and GPU: here g++ takes it as C++.
train_gpt_cpu: train_gpt.cu $(HEADERS) Makefile build/options_cpu | dependencies
	@$(if $(and $(HAS_HIREDIS),$(HAS_OPENSSL),$(HAS_PCRE2)),,$(say_what_is_left_out))
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

test_gpt_cpu: test_gpt.cu train_gpt.cu $(HEADERS) $(wildcard dev/test/*.h dev/test/unit/*.h dev/test/unit/*/*.h) Makefile build/options_cpu \
        | dependencies
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

build/%.o: dev/test/%.cpp $(HEADERS) $(wildcard dev/test/*.h dev/test/unit/*.h dev/test/unit/*/*.h) Makefile build/options_cpu | dependencies
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c $< -o $@

# Texts to tokens, for test_encode.py.
build/encode: dev/test/encode.cpp llmc/text/byte_pair_encoder.h llmc/text/gpt2_pattern.h llmc/text/tokenizer.h llmc/file.h \
        llmc/error.h Makefile build/options_cpu | dependencies
	@mkdir -p build
	$(CXX) $(CXXFLAGS) $< -o $@ $(DEPS_LINK) $(if $(HAS_PCRE2),-lpcre2-8)

build/unit_tests: $(UNIT_TESTS)
	$(CXX) $(CXXFLAGS) $^ -o $@ -lgtest_main -lgtest $(LDLIBS)

# debug: not tested, for gdb.
OPTIMIZE = -O2 -g1
build/debug/%: OPTIMIZE = -O0 -g
build/fp32/%: SANITIZER = -DENABLE_FP32
# SANITIZER: of kernels and tests. OWN_SANITIZER: of the emulator, see dev/emulator/sanitizers.h.
build/address/%: SANITIZER = -fsanitize=address,undefined -fno-sanitize-recover=undefined
build/address/%: OWN_SANITIZER = $(SANITIZER)
# Kernels' tests spend more of their time in the compiler than in running, most under this sanitizer.
$(patsubst dev/test/kernels/%.cpp,build/address/%.o,$(wildcard dev/test/kernels/test_*.cpp)): OPTIMIZE = -O1 -g1
build/thread/%: SANITIZER = -fsanitize=thread
build/thread/%: OWN_SANITIZER = -DEMULATOR_THREAD_SANITIZER

define emulator_build
$(EMULATOR:%=build/$(1)/%.o): build/$(1)/%.o: dev/emulator/%.cpp $$(EMULATOR_HEADERS)
	@mkdir -p $$(@D)
	$$(CXX) $$(EMULATED) $$(OWN_SANITIZER) -c $$< -o $$@

$(KERNEL_TESTS:%=build/$(1)/%.o): build/$(1)/%.o: %.cpp $$(EMULATOR_HEADERS)
	@mkdir -p $$(@D)
	$$(CXX) $$(EMULATED) $$(SANITIZER) -c $$< -o $$@

# The emulator's objects first: thread sanitizer's copies of the templates that they share with a test would
# else replace theirs. One test a program: of several, the sanitizers' reports lose lines of templates.
# -rdynamic: reports name kernels.
$(KERNEL_TESTS:%=build/$(1)/%): build/$(1)/%: $(EMULATOR:%=build/$(1)/%.o) build/$(1)/%.o
	$$(CXX) -rdynamic $$(SANITIZER) $$^ -o $$@ $$(DEPS_LINK) \
	    -lgtest_main -lgtest -lboost_context -ldnnl -ldl -lpthread
endef

# The whole CUDA trainer on a CPU: linked to the emulator instead of the GPU's libraries.
train_gpt_emulated: build/plain/train_gpt
	cp $< $@

define emulated_trainer
build/$(1)/train_gpt: train_gpt.cu $(EMULATOR:%=build/$(1)/%.o) $(EMULATOR_HEADERS) | dependencies
	$$(CXX) -rdynamic $$(EMULATED) $$(SANITIZER) -x c++ -c $$< -o $$@.o
	$$(CXX) -rdynamic $$(SANITIZER) $(EMULATOR:%=build/$(1)/%.o) $$@.o -o $$@ -lboost_context -ldl $$(LDLIBS)
endef
$(foreach kind,plain debug address thread fp32,$(eval $(call emulated_trainer,$(kind))))

# As where there is none of Gloo, hiredis, OpenSSL and PCRE2: what needs them is refused.
build/without/train_gpt: private OPTIMIZE = -O0
build/without/train_gpt: private HAS_GLOO =
build/without/train_gpt: private HAS_HIREDIS =
build/without/train_gpt: private HAS_OPENSSL =
build/without/train_gpt: private HAS_PCRE2 =
build/without/train_gpt: train_gpt.cu $(EMULATOR:%=build/plain/%.o) $(EMULATOR_HEADERS) | dependencies
	@mkdir -p $(@D)
	$(CXX) -rdynamic $(EMULATED) -x c++ $< -x none $(EMULATOR:%=build/plain/%.o) -o $@ \
	    $(DEPS_LINK) -lboost_context -ldl -lxxhash -lpthread

# test_gpt through the emulated kernels; fp32: of a GPU's fp32 build.
build/plain/test_gpt build/fp32/test_gpt build/debug/test_gpt: build/%/test_gpt: test_gpt.cu train_gpt.cu \
        $(EMULATOR:%=build/plain/%.o) $(EMULATOR_HEADERS) | dependencies
	@mkdir -p $(@D)
	$(CXX) -rdynamic $(EMULATED) $(SANITIZER) -x c++ $< -x none $(EMULATOR:%=build/plain/%.o) -o $@ \
	    -lboost_context -ldl $(LDLIBS)

$(foreach kind,plain debug address thread fp32,$(eval $(call emulator_build,$(kind))))

build/bench_cpu: dev/bench/bench_cpu.cpp train_gpt.cu $(HEADERS) dev/test/alone.h Makefile build/options_cpu \
        | dependencies
	@mkdir -p build
	$(CXX) $(CXXFLAGS) $< -o $@ $(LDLIBS)

setup:
	@CUDA_HOME="$(CUDA_HOME)" $(if $(DEPS_HOME),SKIP_PACKAGES=1) bash scripts/setup.sh \
	    $(if $(OFFLINE),--offline "$(OFFLINE)" $(if $(DEPS_HOME),--prefix "$(DEPS_HOME)"))

# pytest runs everything, the GoogleTest binary and test_gpt_cpu included, so that one line counts all of it.
test test-long: setup
	$(MAKE) -j2 train_gpt_cpu test_gpt_cpu build/unit_tests build/encode $(PLAIN_TESTS) $(EMULATED_TRAINERS) \
	    $(if $(filter test-long,$@),$(LONG_TESTS))
	.venv/bin/python -m pytest -q -rs dev/test $(if $(filter test-long,$@),--long)

test-emulated: setup
	$(MAKE) -j2 $(EMULATOR_TESTS) test_gpt_cpu
	.venv/bin/python -m pytest -q --long dev/test/processes/test_emulator.py dev/test/processes/test_gpt.py

# For the GPUs of 2020, 2022 and 2024, linked where NCCL is; what nvcc warns of is an error.
check-cuda:
ifeq ($(NVCC),)
	@echo "not checked: whether nvcc takes the kernels, for there is none (CUDA_HOME says where to look)"
else
	$(MAKE) build/nvcc/train_gpt.o build/nvcc/test_gpt_fp32.o $(CUDA_TESTS)
	@if $(call gpu_links,nccl.h,$(NCCL_LINK)); then $(MAKE) build/nvcc/train_gpt; else \
	    echo "not checked: whether train_gpt links, for there is no NCCL (NCCL_HOME says where to look)"; fi
endif

build/nvcc/train_gpt: build/nvcc/train_gpt.o
	$(NVCC) $(call code_for,80 90 100) $(GPU_HOST) $< -o $@ $(GPU_LIBS)

build/nvcc/train_gpt.o: train_gpt.cu
build/nvcc/test_gpt_fp32.o: test_gpt.cu train_gpt.cu
build/nvcc/train_gpt.o build/nvcc/test_gpt_fp32.o: $(EMULATOR_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_FLAGS) $(if $(findstring fp32,$@),-DENABLE_FP32) $(call code_for,80 90 100) $(GPU_HOST) \
	    -c $(firstword $(filter %.cu,$^)) -o $@

GPU_TESTS = $(patsubst dev/test/kernels/%.cpp,build/gpu/%,$(wildcard dev/test/kernels/test_*.cpp)) \
            build/gpu/test_kernels
build/gpu/%: %.cpp $(EMULATOR_HEADERS) build/options_gpu | dependencies gpu_dependencies
	@mkdir -p $(@D)
	$(GPU_COMPILER) -x cu $(CUDA_FLAGS) $(GPU_CODE) $(GPU_HOST) $< -o $@ \
	    $(GPU_LINK) $(DEPS_LINK) -lgtest_main -lgtest -lcublasLt -ldnnl -lpthread

build/gpu/test_gpt_fp32: test_gpt.cu train_gpt.cu
build/gpu/bench_gpu: dev/bench/bench_gpu.cu train_gpt.cu
build/gpu/test_gpt_fp32 build/gpu/bench_gpu: $(EMULATOR_HEADERS) build/options_gpu | gpu_dependencies
	@mkdir -p $(@D)
	$(GPU_COMPILER) $(CUDA_FLAGS) $(if $(findstring fp32,$@),-DENABLE_FP32) $(GPU_CODE) $(GPU_HOST) \
	    $(firstword $(filter %.cu,$^)) -o $@ $(GPU_LIBS)

# On a GPU what test-emulated runs on a CPU, and more: dev/test/processes/test_gpu.py. train_gpt_cpu: to compare with.
# PYTHON=python3: with that one's pytest and NumPy, and nothing is set up.
PYTHON ?= .venv/bin/python
test-gpu: $(if $(filter .venv/%,$(PYTHON)),setup)
	@if nvidia-smi -L >/dev/null 2>&1; then \
	    $(MAKE) $(GPU_TESTS) test_gpt build/gpu/test_gpt_fp32 train_gpt train_gpt_cpu; fi
	$(PYTHON) -m pytest -q -rs dev/test/processes/test_gpu.py

# PARTS="d12 layers": only these (dev/bench/bench_gpu.py says which there are). PEER: a Python with PyTorch.
PEER ?= python3
bench-gpu:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "error: there is no GPU here: run it where one is" >&2; exit 2; }
	$(MAKE) train_gpt build/gpu/bench_gpu
	python3 dev/bench/bench_gpu.py --peer-python $(PEER) $(PARTS)

# The benchmark through emulated kernels, for test_bench_gpu.py, which is a long test.
build/plain/bench_gpu: private OPTIMIZE = -O1
build/plain/bench_gpu: dev/bench/bench_gpu.cu train_gpt.cu $(EMULATOR:%=build/plain/%.o) $(EMULATOR_HEADERS) \
        | dependencies
	@mkdir -p $(@D)
	$(CXX) -rdynamic $(EMULATED) -x c++ $< -x none $(EMULATOR:%=build/plain/%.o) -o $@ \
	    -lboost_context -ldl $(LDLIBS)

# All kernels are in train_gpt.cu; of their tests it is enough that nvcc takes them.
build/nvcc/%.ptx: %.cpp $(EMULATOR_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) -x cu $(CUDA_FLAGS) -arch=compute_90 -ptx $< -o $@

include dev/break/fuzz/fuzz.mk

# ARGUMENTS="--seed 7": dev/break/torture.py --help
KILLS ?= 500
torture: setup
	$(MAKE) train_gpt_cpu
	.venv/bin/python dev/break/torture.py --kills $(KILLS) $(ARGUMENTS)

MINUTES = 10
# ARGUMENTS="--links": dev/break/chaos.py --help
chaos: setup
	$(MAKE) train_gpt_cpu $(if $(findstring --links,$(ARGUMENTS)),build/relay)
	.venv/bin/python dev/break/chaos.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGUMENTS)

mutate: setup
	.venv/bin/python dev/break/mutate.py $(MUTATE)

registers:
	python3 dev/bench/registers.py --nvcc $(or $(NVCC),nvcc)

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

build/bench_formats: dev/bench/bench_formats.cpp $(HEADERS) Makefile
	@mkdir -p build
	$(CXX) $(CXXFLAGS) $< -o $@ -lpthread

# Deltas are what 60 inner steps change: two model files of a run of this program, or of a small one made here.
RECORDED = build/deltas/model_00000060.bin build/deltas/model_00000120.bin
DELTAS ?= $(RECORDED)
bench-formats: setup
	$(MAKE) build/bench_formats $(if $(filter $(RECORDED),$(DELTAS)),build/deltas/model_00000120.bin)
	build/bench_formats $(DELTAS)

build/deltas/model_00000120.bin: | train_gpt_cpu
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/deltas/text
	./train_gpt_cpu -i 'build/deltas/text/*_train_*.bin' -o build/deltas -e d6 --layers 4 --channels 128 \
	    -t 64 -b 8 -l 1e-3 -u 20 -x 120 -n 60 -v 0 -s 0

# ARGUMENTS="--minutes 30": dev/bench/wire_quality.py --help
bench-wire-quality: setup
	$(MAKE) train_gpt_cpu
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/wire_quality/text
	.venv/bin/python dev/bench/wire_quality.py --report dev/results/wire_quality.md $(ARGUMENTS)

simulate: setup
	.venv/bin/python dev/tools/simulate.py --paper
	@mkdir -p build
	.venv/bin/python dev/tools/simulate.py --plot build/simulated.png

# ARGUMENTS="--minutes 30", "--text DIR": dev/bench/quality.py --help
bench-quality: setup
	$(MAKE) train_gpt_cpu
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/quality/text
	.venv/bin/python dev/bench/quality.py --report dev/results/quality.md $(ARGUMENTS)

build/relay: dev/wan/relay.cpp
	@mkdir -p build
	$(CXX) -std=c++17 -O2 $(WARNINGS) $< -o $@

# ARGUMENTS="--quick", "--only ...": dev/bench/wan.py --help, dev/bench/uneven.py --help
bench-wan bench-uneven: bench-%:
	@python3 dev/wan/sites.py
	$(MAKE) setup
	$(MAKE) train_gpt_cpu build/relay
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/$*/text
	.venv/bin/python dev/bench/$*.py --report dev/results/$*.md $(ARGUMENTS)

clean:
	rm -rf build train_gpt train_gpt_cpu train_gpt_emulated test_gpt test_gpt_cpu

.PHONY: all always setup test test-long test-emulated test-gpu check-cuda demo bench-cpu bench-formats \
        bench-wire-quality bench-quality bench-wan bench-uneven bench-gpu simulate mutate torture chaos \
        registers clean
