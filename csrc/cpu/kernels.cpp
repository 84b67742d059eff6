#include "cpu/kernels.h"

namespace epruntime {

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> found;
#ifdef EPRUNTIME_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&kAvx512Bf16Kernels);
    if (avx512) found.push_back(&kAvx512Kernels);
    if (avx2) found.push_back(&kAvx2Kernels);
#endif
    found.push_back(&kPortableKernels);
    return found;
}

}  // namespace epruntime
