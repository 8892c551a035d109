# make fuzz       each parser of files, payloads and the store under libFuzzer, for SECONDS=60 each
# make fuzz-NAME  one of them: dev/break/fuzz/fuzz_NAME.cpp. Inputs that fail are kept as build/fuzz/found-NAME-...
# CLANG=clang++-17: the compiler to use instead of clang++. FUZZ_TIMEOUT=5: seconds that one input may take.
CLANG ?= clang++
SECONDS ?= 60
FUZZ_TIMEOUT ?= 5
FUZZ_BUILD ?= build/fuzz
FUZZ_CORPUS ?= $(FUZZ_BUILD)/corpus
FUZZ_SOURCES ?= .
FUZZERS = $(patsubst dev/break/fuzz/fuzz_%.cpp,%,$(wildcard dev/break/fuzz/fuzz_*.cpp))
EMPTY_FUZZER = extern "C" int LLVMFuzzerTestOneInput() { return 0; }
HAS_FUZZER = $(call once,HAS_FUZZER,$(shell echo '$(EMPTY_FUZZER)' | \
               $(CLANG) -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null && echo yes))
NO_FUZZER = there is no $(CLANG) with libFuzzer here: install clang, or name one with CLANG=
# For make test-long: empty without clang.
FUZZ_PROGRAMS = $(if $(HAS_FUZZER),$(FUZZERS:%=$(FUZZ_BUILD)/%))

# -O1, because make test-long builds these each time. CLI11 takes longer to optimize than to run. Clang's warnings are
# not errors, not even in CI: each version of clang has others.
FUZZ_OPTIMIZE = -O1
$(FUZZ_BUILD)/config: FUZZ_OPTIMIZE = -O0
FUZZ_FLAGS = -std=c++17 $(FUZZ_OPTIMIZE) -g1 -fno-omit-frame-pointer -ffp-contract=off -fno-strict-aliasing \
             -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Wall -Wextra \
             -Wno-unknown-pragmas -I$(FUZZ_SOURCES) -I. $(DEPS_FLAGS) $(WITHOUT)
# No input may make a parser use much memory or time.
FUZZ_LIMITS = -max_len=16384 -rss_limit_mb=512 -malloc_limit_mb=64 -timeout=$(FUZZ_TIMEOUT)

fuzz: $(FUZZERS:%=fuzz-%)

$(FUZZERS:%=$(FUZZ_BUILD)/%): $(FUZZ_BUILD)/%: dev/break/fuzz/fuzz_%.cpp dev/break/fuzz/fuzz.h dev/break/fuzz/fuzz.mk \
        $(HEADERS) dev/test/unit/local_comm.h | dependencies
	@[ -n "$(HAS_FUZZER)" ] || { echo "error: $(NO_FUZZER)" >&2; exit 2; }
	@mkdir -p $(@D)
	$(CLANG) $(FUZZ_FLAGS) $< -o $@ $(DEPS_LINK) $(OPTIONAL_LIBS) -lxxhash -lpthread

# Seeds are made anew each time. The corpus, the inputs that libFuzzer finds worth keeping, grows from run to run.
# ASan keeps freed memory for a while, but not so much that it would count against the parser.
FUZZ_TMPDIR = $(firstword $(wildcard /dev/shm) /tmp)
FUZZ_RUN = ASAN_OPTIONS=quarantine_size_mb=64 $< $(FUZZ_LIMITS) $(FUZZ_OPTIONS) -max_total_time=$(SECONDS) \
           -print_final_stats=1 -artifact_prefix=$(FUZZ_BUILD)/found-$*- $(FUZZ_CORPUS)/$* \
           $(FUZZ_BUILD)/seeds/$*
$(FUZZERS:%=fuzz-%): fuzz-%: $(FUZZ_BUILD)/%
	@rm -rf $(FUZZ_BUILD)/seeds/$* && mkdir -p $(FUZZ_BUILD)/seeds/$* $(FUZZ_CORPUS)/$*
	@$< seeds=$(FUZZ_BUILD)/seeds/$*
	@echo "fuzz_$* for $(SECONDS) seconds"
	@export TMPDIR="$$(mktemp -d -p $(FUZZ_TMPDIR))" && trap 'rm -rf "$$TMPDIR"' EXIT && \
	    { $(FUZZ_RUN) >$(FUZZ_BUILD)/$*.log 2>&1 || { tail -n 50 $(FUZZ_BUILD)/$*.log; \
	    echo "error: fuzz_$* has found a bug: its whole output is in $(FUZZ_BUILD)/$*.log" >&2; exit 1; }; }
	@sed -n 's/^stat::number_of_executed_units: */fuzz_$*: nothing found; inputs: /p' $(FUZZ_BUILD)/$*.log

.PHONY: fuzz $(FUZZERS:%=fuzz-%)
