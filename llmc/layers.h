// All layers: the CPU's functions or, with USE_CUDA, the GPU's, which have the same names.
#pragma once
#ifdef USE_CUDA
#include "llmc/cuda/adamw.cuh"
#include "llmc/cuda/attention.cuh"
#include "llmc/cuda/classifier.cuh"
#include "llmc/cuda/encoder.cuh"
#include "llmc/cuda/gelu.cuh"
#include "llmc/cuda/global_norm.cuh"
#include "llmc/cuda/layernorm.cuh"
#include "llmc/cuda/matmul.cuh"
#include "llmc/cuda/memory.cuh"
#include "llmc/cuda/muon.cuh"
#include "llmc/cuda/outlier.cuh"
#else
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/encoder.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/global_norm.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/memory.h"
#include "llmc/cpu/muon.h"
#include "llmc/cpu/outlier.h"
#endif

using device::Activation;
using device::ActivationBuffer;
