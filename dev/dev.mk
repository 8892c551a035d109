# Developers' targets; the Makefile, which includes this file, has the users'. dev/README.md says what they find.
# make test-long       what takes too long for make test, too: sanitizers, fuzzers, nvcc, benchmarks' trials
# make test-commands   every command that the documents show, those that take minutes too
# make test-emulated   CUDA kernels on this CPU, with three kinds of sanitizers (part of make test-long)
# make check-cuda      the same kernels compiled by nvcc, and what it made of them (part of make test-long)
# make test-gpu        the same tests and more on this machine's GPU
# make gpu-report      these and make bench-gpu, likely trouble first, and a report for an issue; DRY_RUN=1: emulated
# make fuzz            each parser of files, payloads and the store under libFuzzer, SECONDS=60 each (clang)
# make torture         kills a run KILLS=500 times, in the middle of writes too, and compares its bits
# make chaos           elastic workers are killed, stopped, slowed and cut off for MINUTES=10; SEED=, STORE=s3
# make attack          all of these and more, one blow after another for MINUTES=10, with a verdict on each; SEED=
# make mutate          breaks kernels and host code on purpose: do the tests notice? (MUTATE=--help: options)
# make bench-losses    whole runs beside PyTorch's: the same losses? (PEERS=1 installs it, PEER=PYTHON has it)
# make bench-peers     beside torchft and GradientMail (root, PEERS=1: installs them, 11 GB); ARGUMENTS=--quick
# make registers       registers and spills of each kernel, as nvcc reports them
# make train_gpt_emulated   the CUDA trainer on this CPU, linked to the emulator instead of the GPU's libraries

# ---- tests on the CPU

TEST_HEADERS = $(wildcard dev/test/*.h dev/test/unit/*.h dev/test/unit/*/*.h dev/test/kernels/*.h)
# The tests of a room are compiled as one: most of the time goes into the headers that they share.
UNIT_ROOMS = $(sort $(notdir $(patsubst %/,%,$(dir $(wildcard dev/test/unit/*/test_*.cpp)))))
UNIT_TESTS = $(UNIT_ROOMS:%=build/unit/%.o)

test_gpt_cpu: test_gpt.cu train_gpt.cu $(HEADERS) $(TEST_HEADERS) Makefile dev/dev.mk build/options_cpu build/options_unit | dependencies
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LDLIBS)

# Most unit tests take longer to compile than to run. For gdb: make build/unit_tests UNIT_OPTIMIZE="-O0 -g"
UNIT_OPTIMIZE ?= -O1
build/options_unit: OPTIONS = $(UNIT_OPTIMIZE)
build/options_unit: always
build/unit/%.o: private OPTIMIZE_CPU = $(UNIT_OPTIMIZE)
test_gpt_cpu build/encode: private OPTIMIZE_CPU = $(UNIT_OPTIMIZE)
$(foreach room,$(UNIT_ROOMS),$(eval build/unit/$(room).o: $(wildcard dev/test/unit/$(room)/test_*.cpp)))
build/unit/%.o: $(HEADERS) $(TEST_HEADERS) Makefile dev/dev.mk build/options_cpu build/options_unit | dependencies
	@mkdir -p $(@D)
	printf '#include "%s"\n' dev/test/unit/$*/test_*.cpp | $(CXX) $(CXXFLAGS) -x c++ -c - -o $@

build/unit_tests: $(UNIT_TESTS)
	$(CXX) $(CXXFLAGS) $^ -o $@ -lgtest_main -lgtest $(LDLIBS)

# Encodes texts, for test_encode.py.
build/encode: dev/test/encode.cpp $(HEADERS) Makefile build/options_cpu build/options_unit | dependencies
	@mkdir -p build
	$(CXX) $(CXXFLAGS) $< -o $@ $(DEPS_LINK) $(if $(HAS_PCRE2),-lpcre2-8)

# Tests that run at the same time. More than one per core is faster on an idle machine, but nearer to time limits.
TEST_JOBS ?= $(JOBS)
PYTEST = .venv/bin/python -m pytest -q -n $(TEST_JOBS) --dist loadgroup

# pytest runs everything, the GoogleTest programs and test_gpt_cpu included, so that its last line counts all of it.
test test-long: setup
	$(MAKE) -j$(JOBS) $(if $(filter test,$@),$(PLAIN_TESTS),$(LONG_TESTS)) $(EMULATED_TRAINERS) \
	    train_gpt_cpu test_gpt_cpu build/unit_tests build/encode
	$(PYTEST) -rs dev/test $(if $(filter test-long,$@),--long)

# Every command that the documents show, including those that take minutes.
test-commands: setup
	$(MAKE) -j$(JOBS) train_gpt_cpu test_gpt_cpu build/unit_tests build/relay
	EVERY_COMMAND=1 .venv/bin/python -m pytest -q -rs --long dev/test/tools/test_commands.py

# ---- CUDA on this CPU: dev/emulator/README.md

# The emulator compiles kernels with g++ and CUDA's headers: the toolkit's, or those that make setup fetched.
CUDA_HEADER = $(firstword $(wildcard $(CUDA_HOME)/include/cublasLt.h \
                .venv/lib/python3.*/site-packages/nvidia/cu13/include/cuda_fp4.h))
CUDA_HEADERS = $(filter-out /usr/include/,\
                 $(dir $(or $(CUDA_HEADER),$(error no CUDA headers: run make setup))))
EMULATED = -std=c++17 $(OPTIMIZE) -DUSE_CUDA -ffp-contract=off -fno-strict-aliasing $(WARNINGS) \
           -Wno-unknown-pragmas -I. \
           $(addprefix -isystem ,$(CUDA_HEADERS) .venv/cuda) $(DEPS_FLAGS) $(WITHOUT)
EMULATOR_HEADERS = $(HEADERS) $(TEST_HEADERS) $(wildcard dev/emulator/*.h) Makefile dev/dev.mk
EMULATOR = emulator machine device_memory queue runtime copies streams cublaslt nccl nccl_communicator \
           nccl_operations nccl_peers
KERNEL_SOURCES = $(wildcard dev/emulator/test_*.cpp dev/test/kernels/test_*.cpp)
KERNEL_TESTS = $(notdir $(KERNEL_SOURCES:.cpp=))
LAYER_TESTS = $(notdir $(basename $(wildcard dev/test/kernels/test_*.cpp)))
vpath test_%.cpp dev/emulator dev/test/kernels
# What make test runs of these; the long tests run the same programs with sanitizers instead, and in fp32 (parameters
# and activations as in a GPU's fp32 build).
PLAIN_TESTS = $(KERNEL_TESTS:%=build/plain/%) build/plain/test_gpt
EMULATOR_TESTS = build/plain/test_gpt $(foreach kind,address thread,$(KERNEL_TESTS:%=build/$(kind)/%)) \
                 $(LAYER_TESTS:%=build/fp32/%) build/fp32/test_gpt
EMULATED_TRAINERS = build/plain/train_gpt build/without/train_gpt
# What takes longest comes first; otherwise one core would wait for another at the end.
LONG_TESTS = check-cuda build/thread/train_gpt $(DRY_PROGRAMS) $(EMULATOR_TESTS) $(FUZZ_PROGRAMS)

# -O1: these, too, take longer to compile than to run.   debug: not tested, for gdb.
OPTIMIZE = -O1 -g1
build/debug/%: OPTIMIZE = -O0 -g
build/fp32/%: SANITIZER = -DENABLE_FP32
# SANITIZER: of kernels and tests. OWN_SANITIZER: of the emulator, see dev/emulator/sanitizers.h.
build/address/%: SANITIZER = -fsanitize=address,undefined -fno-sanitize-recover=undefined
build/address/%: OWN_SANITIZER = $(SANITIZER)
build/thread/%: SANITIZER = -fsanitize=thread
build/thread/%: OWN_SANITIZER = -DEMULATOR_THREAD_SANITIZER

# The emulator's objects are linked first: thread sanitizer's copies of the templates that they share with a test
# would otherwise replace theirs. Each test is a program: of several in one, sanitizers' reports lose template names.
# -rdynamic: reports name kernels.
define emulator_build
$(EMULATOR:%=build/$(1)/%.o): build/$(1)/%.o: dev/emulator/%.cpp $$(EMULATOR_HEADERS)
	@mkdir -p $$(@D)
	$$(CXX) $$(EMULATED) $$(OWN_SANITIZER) -c $$< -o $$@

$(KERNEL_TESTS:%=build/$(1)/%.o): build/$(1)/%.o: %.cpp $$(EMULATOR_HEADERS)
	@mkdir -p $$(@D)
	$$(CXX) $$(EMULATED) $$(SANITIZER) -c $$< -o $$@

$(KERNEL_TESTS:%=build/$(1)/%): build/$(1)/%: $(EMULATOR:%=build/$(1)/%.o) build/$(1)/%.o
	$$(CXX) -rdynamic $$(SANITIZER) $$^ -o $$@ $$(DEPS_LINK) \
	    -lgtest_main -lgtest -lboost_context -ldnnl -ldl -lpthread

build/$(1)/train_gpt: train_gpt.cu $(EMULATOR:%=build/$(1)/%.o) $$(EMULATOR_HEADERS) | dependencies
	$$(CXX) -rdynamic $$(EMULATED) $$(SANITIZER) -x c++ -c $$< -o $$@.o
	$$(CXX) -rdynamic $$(SANITIZER) $(EMULATOR:%=build/$(1)/%.o) $$@.o -o $$@ -lboost_context -ldl $$(LDLIBS)
endef
$(foreach kind,plain debug address thread fp32,$(eval $(call emulator_build,$(kind))))

train_gpt_emulated: build/plain/train_gpt
	cp $< $@

# A system without hiredis, OpenSSL, libcurl and PCRE2: what needs them is refused.
build/without/train_gpt: private OPTIMIZE = -O0
build/without/train_gpt: private HAS_HIREDIS =
build/without/train_gpt: private HAS_OPENSSL =
build/without/train_gpt: private HAS_CURL =
build/without/train_gpt: private HAS_PCRE2 =
build/without/train_gpt: train_gpt.cu $(EMULATOR:%=build/plain/%.o) $(EMULATOR_HEADERS) | dependencies
	@mkdir -p $(@D)
	$(CXX) -rdynamic $(EMULATED) -x c++ $< -x none $(EMULATOR:%=build/plain/%.o) -o $@ \
	    $(DEPS_LINK) -lboost_context -ldl -lxxhash -lpthread

# test_gpt and the GPU's benchmark (for test_bench_gpu.py) through the emulated kernels; fp32: of a GPU's fp32 build.
build/plain/bench_gpu: dev/bench/bench_gpu.cu train_gpt.cu
build/plain/test_gpt build/fp32/test_gpt build/debug/test_gpt: test_gpt.cu train_gpt.cu
build/plain/bench_gpu build/plain/test_gpt build/fp32/test_gpt build/debug/test_gpt: $(EMULATOR:%=build/plain/%.o) \
        $(EMULATOR_HEADERS) | dependencies
	@mkdir -p $(@D)
	$(CXX) -rdynamic $(EMULATED) $(SANITIZER) -x c++ $(firstword $(filter %.cu,$^)) -x none \
	    $(EMULATOR:%=build/plain/%.o) -o $@ -lboost_context -ldl $(LDLIBS)

test-emulated: setup
	$(MAKE) -j$(JOBS) $(EMULATOR_TESTS) test_gpt_cpu
	$(PYTEST) --long dev/test/processes/test_emulator.py dev/test/processes/test_gpt.py

# ---- nvcc, and GPUs

# For the GPUs of 2020, 2022 and 2024, and linked where NCCL is; nvcc's warnings are errors. In fp32 one GPU is enough,
# and the kernels' tests need only compile: the trainer has all kernels.
build/nvcc/%: CI = true
build/nvcc/%: GPU_FLAGS += -Xcompiler -O1  # of the host's code, which g++ optimizes elsewhere
CUDA_TESTS = $(LAYER_TESTS:%=build/nvcc/%.ptx) build/nvcc/test_kernels.ptx
check-cuda:
ifeq ($(NVCC),)
	@echo "not checked: whether nvcc compiles the kernels: none was found (set CUDA_HOME)"
else
	$(MAKE) build/nvcc/train_gpt.o build/nvcc/test_gpt_fp32.o $(CUDA_TESTS)
	@if $(call gpu_links,nccl.h,$(NCCL_LINK)); then $(MAKE) build/nvcc/train_gpt; else \
	    echo "not checked: whether train_gpt links: no NCCL was found (set NCCL_HOME)"; fi
	python3 dev/bench/check_kernels.py --nvcc $(NVCC)
endif

build/nvcc/train_gpt: build/nvcc/train_gpt.o
	$(NVCC) $(call code_for,80 90 100) $(GPU_HOST) $< -o $@ $(GPU_LIBS)

build/nvcc/train_gpt.o: train_gpt.cu
build/nvcc/test_gpt_fp32.o: test_gpt.cu train_gpt.cu
build/nvcc/train_gpt.o build/nvcc/test_gpt_fp32.o: $(EMULATOR_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_FLAGS) $(if $(findstring fp32,$@),-DENABLE_FP32 $(call code_for,90),$(call code_for,80 90 100)) \
	    $(GPU_HOST) -c $(firstword $(filter %.cu,$^)) -o $@

build/nvcc/%.ptx: %.cpp $(EMULATOR_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) -x cu $(CUDA_FLAGS) -arch=compute_90 -ptx $< -o $@

# nvcc does not know all of the vector instructions that the CPU's layers use where g++ names them.
WITHOUT_VECTORS = -Xcompiler -U__AVX2__,-U__AVX512F__,-U__AVX512BF16__,-U__AMX_BF16__
GPU_TESTS = $(LAYER_TESTS:%=build/gpu/%) build/gpu/test_kernels
build/gpu/%: %.cpp $(EMULATOR_HEADERS) build/options_gpu | dependencies gpu_dependencies
	@mkdir -p $(@D)
	$(GPU_COMPILER) -x cu $(CUDA_FLAGS) $(GPU_CODE) $(GPU_HOST) $(WITHOUT_VECTORS) $< -o $@ \
	    $(GPU_LINK) $(DEPS_LINK) -lgtest_main -lgtest -lcublasLt -ldnnl -lpthread

build/gpu/test_gpt_fp32: test_gpt.cu train_gpt.cu
build/gpu/bench_gpu: dev/bench/bench_gpu.cu train_gpt.cu
build/gpu/test_gpt_fp32 build/gpu/bench_gpu: $(EMULATOR_HEADERS) build/options_gpu | gpu_dependencies
	@mkdir -p $(@D)
	$(GPU_COMPILER) $(CUDA_FLAGS) $(if $(findstring fp32,$@),-DENABLE_FP32) $(GPU_CODE) $(GPU_HOST) \
	    $(firstword $(filter %.cu,$^)) -o $@ $(GPU_LIBS)

# dev/test/processes/test_gpu.py compares with train_gpt_cpu. PYTHON=python3: uses that Python's pytest and
# NumPy, and sets nothing up.
PYTHON ?= .venv/bin/python
test-gpu: $(if $(filter .venv/%,$(PYTHON)),setup)
	@if nvidia-smi -L >/dev/null 2>&1; then \
	    $(MAKE) $(GPU_TESTS) test_gpt build/gpu/test_gpt_fp32 train_gpt train_gpt_cpu; fi
	$(PYTHON) -m pytest -q -rs dev/test/processes/test_gpu.py

# The first thing to run on a new GPU. ARGUMENTS="--only memory speed": dev/bench/gpu_report.py --help
DRY_PROGRAMS = $(addprefix build/plain/,train_gpt bench_gpu test_gpt test_elementwise)
gpu-report: $(if $(filter .venv/%,$(PYTHON)),setup)
ifeq ($(DRY_RUN),)
	@nvidia-smi -L >/dev/null 2>&1 || { \
	    echo "error: there is no GPU here: DRY_RUN=1 tries the same in the emulator" >&2; exit 2; }
	$(MAKE) $(GPU_TESTS) test_gpt build/gpu/test_gpt_fp32 build/gpu/bench_gpu train_gpt train_gpt_cpu
else
	$(MAKE) $(DRY_PROGRAMS)
endif
	$(PYTHON) dev/bench/gpu_report.py $(if $(DRY_RUN),--dry-run) --peer-python $(PEER) $(ARGUMENTS)

registers:
	python3 dev/bench/registers.py --nvcc $(or $(NVCC),nvcc)

# ---- breaking things

include dev/break/fuzz/fuzz.mk

# ARGUMENTS="--seed 7": dev/break/torture.py --help
KILLS ?= 500
torture: setup
	$(MAKE) train_gpt_cpu
	.venv/bin/python dev/break/torture.py --kills $(KILLS) $(ARGUMENTS)

# ARGUMENTS="--links": dev/break/chaos.py --help
MINUTES ?= 10
chaos: setup
	$(MAKE) train_gpt_cpu $(if $(findstring --links,$(ARGUMENTS)),build/relay)
	.venv/bin/python dev/break/chaos.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	    $(if $(STORE),--store $(STORE)) $(ARGUMENTS)

# ARGUMENTS="--only strangers": dev/break/attack.py --help
attack: setup
	$(MAKE) train_gpt_cpu
	.venv/bin/python dev/break/attack.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGUMENTS)

mutate: setup
	.venv/bin/python dev/break/mutate.py $(MUTATE)

# ---- programs of the benchmarks

build/matmul_rate: dev/bench/matmul_rate.cpp llmc/clock.h Makefile build/options_cpu | dependencies
	@mkdir -p build
	$(CXX) $(CXXFLAGS) $< -o $@ $(LDLIBS)

build/bench_formats: dev/bench/bench_formats.cpp $(HEADERS) Makefile build/options_cpu | dependencies
	@mkdir -p build
	$(CXX) $(CXXFLAGS) $< -o $@ -lpthread

build/deltas/model_00000120.bin: | train_gpt_cpu
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/deltas/text
	./train_gpt_cpu -i 'build/deltas/text/*_train_*.bin' -o build/deltas -e d6 --layers 4 --channels 128 \
	    -t 64 -b 8 -l 1e-3 -u 20 -x 120 -n 60 -v 0 -s 0 -y 1

# PyTorch, to compare with: a few GB, in an environment of its own.
.venv-peers/done: requirements-peers.txt
	python3 -m venv .venv-peers
	.venv-peers/bin/pip install -q -r $<
	touch $@

# ARGUMENTS="--minutes 30", "--quick", "--only muon": dev/bench/peer_losses.py --help
bench-losses: REPORT = $(if $(findstring --quick,$(ARGUMENTS)),build,dev/results)/peer_losses.md
bench-losses: setup
	$(MAKE) train_gpt_cpu $(if $(PEERS),.venv-peers/done)
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/peer_losses/text
	$(if $(PEERS),.venv-peers/bin/python,$(PEER)) dev/bench/peer_losses.py --report $(REPORT) $(ARGUMENTS)

# The peers, each in an environment of its own. GradientMail takes Python 3.12.
PEER_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12)
.venv-peers-%/done: dev/bench/peers/%.txt
	$(PEER_PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q -r $<
	touch $@

# ARGUMENTS="--minutes 30", "--quick", "--only torchft redis": dev/bench/peers/peers.py --help
bench-peers: REPORT = $(if $(findstring --quick,$(ARGUMENTS)),build,dev/results)/peers.md
bench-peers:
ifeq ($(PEERS),)
	@echo "would install torchft 0.2.0 and GradientMail 0.0.2, each with PyTorch in an environment of its own"
	@echo "(.venv-peers-torchft, .venv-peers-gradientmail: 11 GB), and compare: PEERS=1 make bench-peers"
else
	@python3 dev/wan/sites.py
	$(MAKE) setup
	$(MAKE) train_gpt_cpu build/relay .venv-peers-torchft/done .venv-peers-gradientmail/done
	.venv/bin/python data/prepare.py --tokenizer bytes --out build/peers/text
	.venv/bin/python dev/bench/peers/peers.py --report $(REPORT) $(ARGUMENTS)
endif

build/relay: dev/wan/relay.cpp
	@mkdir -p build
	$(CXX) -std=c++17 -O2 $(WARNINGS) $< -o $@

.PHONY: test test-long test-commands test-emulated test-gpu gpu-report check-cuda bench-losses bench-peers registers torture chaos attack mutate
