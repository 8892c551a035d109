# What the build looks for, and where. Each can be set: make train_gpt NCCL_HOME=DIR GPU_ARCH="80 90"
#   CUDA_HOME   the CUDA toolkit (else /usr/local/cuda, else where the nvcc of the PATH is)
#   NCCL_HOME   include/nccl.h with lib/libnccl.so or libnccl.so.2, as in NVIDIA's wheel (else CUDA_HOME and
#               DEPS_HOME, else the system's)
#   DEPS_HOME   libraries that are unpacked there instead of installed (make setup OFFLINE=DIR DEPS_HOME=DIR)
#   GPU_ARCH    the GPUs to build for (else this machine's), of 80 and later
#   CPU_ARCH    the CPU to build for (else this machine's)
#   HAS_HIREDIS=  nothing after the = leaves hiredis out although it is there; so do HAS_OPENSSL=,
#               HAS_PCRE2= and HAS_CURL= (libcurl and expat)
GPU_ARCH ?= native
CPU_ARCH ?= native
hash := \#
comma := ,

# Slow checks run when their result is first needed, and only once.
once = $(eval $(1) := $(2))$($(1))
# g++ prefers vectors of 256 bits even where the CPU has 512; with 512 a step in bf16 takes 8% less time (Intel Xeon;
# not measured on AMD).
WIDEST_VECTORS = $(call once,WIDEST_VECTORS,$(if $(filter x86_64%,$(shell $(CXX) -dumpmachine 2>/dev/null)),$\
                   -mprefer-vector-width=512))
# A shell command: does a program that includes $(2) link with the options $(3)?
links = printf '%s\n' '$(hash)if !__has_include(<$(2)>)' '$(hash)error' '$(hash)endif' 'int main() {}' | \
        $(1) -x c++ - -o /dev/null $(3) >/dev/null 2>&1
host_links = $(call links,$(CXX),$(1),$(DEPS_FLAGS) $(DEPS_LINK) $(2))
gpu_links = $(call links,$(NVCC),$(1),$(DEPS_FLAGS) $(GPU_FLAGS) $(DEPS_LINK) $(GPU_LINK) $(2))

# A folder of libraries that is not one of the system's: programs get it as an rpath.
SYSTEM_FOLDERS := /lib /lib64 /usr/lib /usr/lib64 $(wildcard /usr/lib/*-linux-gnu)
library_folder = $(foreach folder,$(filter-out $(SYSTEM_FOLDERS),$(abspath $(1))),\
                   -L$(folder) -Xlinker -rpath -Xlinker $(folder))
first_of = $(firstword $(wildcard $(foreach folder,$(1),$(addprefix $(folder)/,$(2)))))
LIBRARY_FOLDERS := lib64 lib lib/*-linux-gnu targets/*/lib

$(if $(word 2,$(DEPS_HOME)),$(error DEPS_HOME is '$(DEPS_HOME)': give a folder without spaces in its name))
# --disable-new-dtags: the rpath then also serves what these libraries themselves need.
DEPS := $(if $(DEPS_HOME),$(abspath $(DEPS_HOME)) $(abspath $(DEPS_HOME))/usr)
DEPS_FLAGS := $(addprefix -isystem ,$(wildcard $(DEPS:%=%/include) \
                                               $(DEPS:%=%/include/*-linux-gnu)))
DEPS_LIBRARIES := $(wildcard $(foreach folder,$(DEPS),$(addprefix $(folder)/,$(LIBRARY_FOLDERS))))
DEPS_LINK := $(call library_folder,$(DEPS_LIBRARIES)) $(if $(DEPS),-Xlinker --disable-new-dtags)

# Optional: the programs refuse whatever needs a library that is missing.
HAS_HIREDIS = $(call once,HAS_HIREDIS,$(shell $(call host_links,hiredis/hiredis.h,-lhiredis) && echo yes))
HAS_OPENSSL = $(call once,HAS_OPENSSL,$(shell $(call host_links,openssl/opensslconf.h,-lssl -lcrypto) && \
                                                echo yes))
HAS_PCRE2 = $(call once,HAS_PCRE2,$(shell $(call host_links,pcre2.h,-lpcre2-8) && echo yes))
# Older versions of curl do not sign the whole request (CURLOPT_AWS_SIGV4).
IS_NEW_CURL = printf '\043include <curl/curl.h>\n\043if LIBCURL_VERSION_NUM < 0x075800\n\043error old\n\043endif\n' | \
              $(CXX) $(DEPS_FLAGS) -E -x c++ - > /dev/null 2>&1
HAS_CURL = $(call once,HAS_CURL,$(shell $(IS_NEW_CURL) && $(call host_links,curl/curl.h,-lcurl) && \
                                          $(call host_links,expat.h,-lexpat) && echo yes))
WITHOUT = $(if $(HAS_CURL),,-DWITHOUT_CURL) $(if $(HAS_HIREDIS),,-DWITHOUT_HIREDIS) $(if $(HAS_OPENSSL),,-DWITHOUT_OPENSSL) $(if $(HAS_PCRE2),,-DWITHOUT_PCRE2)
OPTIONAL_LIBS = $(if $(HAS_HIREDIS),-lhiredis $(if $(HAS_OPENSSL),-lssl -lcrypto)) \
                $(if $(HAS_PCRE2),-lpcre2-8) $(if $(HAS_CURL),-lcurl -lexpat)
say_what_is_left_out = \
    $(if $(HAS_HIREDIS),,echo "hiredis: not found: --store redis:// is not in this build";) \
    $(if $(HAS_OPENSSL),,echo "OpenSSL: not found: --store rediss:// (TLS) is not in this build";) \
    $(if $(HAS_CURL),,echo "curl: not found, or older than 7.88, or no expat: --store s3:// is not in this build";) \
    $(if $(HAS_PCRE2),,echo "PCRE2: not found: --prompt takes only byte tokenizers in this build";)

# The CUDA toolkit, and NCCL.
NVCC_ON_PATH = $(call once,NVCC_ON_PATH,$(realpath $(shell command -v nvcc)))
USUAL_NVCC := /usr/local/cuda/bin/nvcc
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(or $(wildcard $(USUAL_NVCC)),$(NVCC_ON_PATH),$(USUAL_NVCC)))
NVCC = $(wildcard $(CUDA_HOME)/bin/nvcc)
NO_NVCC = there is no nvcc in $(CUDA_HOME)/bin: set CUDA_HOME=DIR to the folder of the CUDA toolkit
GPU_COMPILER = $(or $(NVCC),$(error $(NO_NVCC)))
NCCL_HERE = $(patsubst %/include/nccl.h,%,$(call first_of,$(CUDA_HOME) $(DEPS),include/nccl.h))
NCCL = $(abspath $(or $(NCCL_HOME),$(NCCL_HERE)))
NCCL_HOME_HAS_IT = $(and $(wildcard $(NCCL)/include/nccl.h),$(NCCL_LIBRARY))
NO_NCCL_HOME = there is no NCCL (include/nccl.h and lib/libnccl.so) in $(NCCL_HOME): correct NCCL_HOME
NCCL_LIBRARY = $(call first_of,$(NCCL),$(addsuffix /libnccl.so,$(LIBRARY_FOLDERS)) \
                                       $(addsuffix /libnccl.so.2,$(LIBRARY_FOLDERS)))
CUBLAS_LIBRARY = $(call first_of,$(CUDA_HOME),$(addsuffix /libcublasLt.so,$(LIBRARY_FOLDERS)))
GPU_FLAGS = $(addprefix -I,$(filter-out /usr/include,$(NCCL:%=%/include)))
GPU_LINK = $(call library_folder,$(sort $(dir $(NCCL_LIBRARY) $(CUBLAS_LIBRARY))))
NCCL_LINK = $(if $(NCCL_LIBRARY),-l:$(notdir $(NCCL_LIBRARY)),-lnccl)

# Code for each GPU that is named; for later GPUs PTX of the newest.
GPUS_HERE = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    grep -xE '[0-9]+\.[0-9]' | tr -d .)
GPUS = $(call once,GPUS,$(shell \
    printf '%s\n' $(if $(filter native,$(GPU_ARCH)),$(GPUS_HERE),$(GPU_ARCH:sm_%=%)) | sort -n | uniq))
code_for = $(foreach sm,$(1),-gencode \
    'arch=compute_$(sm),code=[sm_$(sm)$(if $(filter $(sm),$(lastword $(1))),$(comma)compute_$(sm))]')
GPU_CODE = $(call code_for,$(GPUS))
NO_GPU = no GPU here: name the ones to build for, e.g. make train_gpt GPU_ARCH=90
# bf16 needs compute capability 8.0.
ODD_GPUS = $(call once,ODD_GPUS,$(shell printf '%s\n' $(GPUS) | grep -vxE '([89][0-9]|1[0-9]{2})[af]?'))
NO_SUCH_GPU = no code for a GPU '$(ODD_GPUS)': give numbers from 80 (A100) on, e.g. GPU_ARCH="80 90"

# One line for what is missing, instead of a compiler's many. $(1): what it is, $(2): a command, $(3): advice
require = $(2) || { echo "error: $(1) is missing: $(3)" >&2; exit 2; }

NO_CXX = CXX is $(CXX), which does not compile an empty program
RUN_SETUP = $(CXX) does not find it, run make setup
dependencies:
	@$(call require,a compiler for C++17,$(call host_links,cstddef,-std=c++17),$(NO_CXX))
	@$(call require,oneDNN (dnnl.hpp),$(call host_links,dnnl.hpp,-ldnnl),$(RUN_SETUP))
	@$(call require,CLI11 (CLI/CLI.hpp),$(call host_links,CLI/CLI.hpp,),$(RUN_SETUP))
	@$(call require,xxHash,$(call host_links,xxhash.h,-lxxhash),$(RUN_SETUP))

gpu_dependencies:
	@[ -n "$(NVCC)" ] || { echo "error: $(NO_NVCC)" >&2; exit 2; }
	@[ -n "$(GPUS)" ] || { echo "error: $(NO_GPU)" >&2; exit 2; }
	@$(if $(ODD_GPUS),echo 'error: $(subst ','\'',$(NO_SUCH_GPU))' >&2; exit 2)
	@$(call require,cuBLASLt,$(call gpu_links,cublasLt.h,-lcublasLt),it belongs to the CUDA toolkit)
	@$(if $(and $(NCCL_HOME),$(if $(NCCL_HOME_HAS_IT),,no)),echo "error: $(NO_NCCL_HOME)" >&2; exit 2)
	@$(call require,NCCL,$(call gpu_links,nccl.h,$(NCCL_LINK)),set NCCL_HOME=DIR to its folder)
	@$(call require,CLI11 (CLI/CLI.hpp),$(call gpu_links,CLI/CLI.hpp,),run make setup$(comma) or see DEPS_HOME)
	@$(call require,xxHash,$(call gpu_links,xxhash.h,-lxxhash),run make setup$(comma) or see DEPS_HOME)

.PHONY: dependencies gpu_dependencies
