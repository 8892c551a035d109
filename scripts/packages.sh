# shellcheck shell=bash disable=SC2034
# The packages of Debian and Ubuntu that diloco.c is built and tested with. setup.sh and fetch_offline_deps.sh
# read this.
toolchain=(
    g++ make                                    # the build
    python3-venv                                # text to tokens, plots, tests
)
libraries=(
    libdnnl-dev                                 # oneDNN: matmuls on the CPU
    libhiredis-dev libcli11-dev libxxhash-dev   # Redis, where processes meet; options; checksums
    libssl-dev                                  # Redis over TLS
    libcurl4-openssl-dev libexpat1-dev          # S3, where processes meet: HTTP and signatures; XML
    libpcre2-dev                                # Unicode's letters and numbers, for prompts
    libgtest-dev libboost-context-dev           # tests; the fibers that CUDA threads run as without a GPU
)
extras=(
    bible-kjv                                   # the text of the demo
)
services=(
    redis-server                                # the tests start servers of their own
)

# The release that packages are for.
release() {
    (. /etc/os-release && echo "$ID ${VERSION_ID:-} $(dpkg --print-architecture)")
}
