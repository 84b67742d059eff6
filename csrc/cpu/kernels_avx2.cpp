// Compiled with AVX2 and FMA (setup.py, ISA_FLAGS).
#define EPRUNTIME_SIMD_AVX2
#include "cpu/attention_kernel.h"
#include "cpu/combine_kernel.h"
#include "cpu/gemm_kernel.h"
#include "cpu/kernels.h"

const epruntime::Kernels epruntime::kAvx2Kernels = {"avx2",  attention_scratch_floats, attention_unit,
                                                    combine, gemm_scratch_floats,      gemm_unit};
