// Compiled with AVX-512 F, BW, DQ, VL (setup.py, ISA_FLAGS).
#define EPRUNTIME_SIMD_AVX512
#include "cpu/attention_kernel.h"
#include "cpu/combine_kernel.h"
#include "cpu/gemm_kernel.h"
#include "cpu/kernels.h"

const epruntime::Kernels epruntime::kAvx512Kernels = {"avx512", attention_scratch_floats, attention_unit,
                                                      combine,  gemm_scratch_floats,      gemm_unit};
