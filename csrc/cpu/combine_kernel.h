// Combine: a token's K expert rows, weighted and added in k order in fp32, cast once.
#pragma once

#include "common/types.h"
#include "cpu/simd.h"

namespace {

template <typename T>
void combine_tokens(const epruntime::CombineArgs& args, int64_t first_token, int64_t last_token) {
    constexpr int64_t kColumns = 4096;  // the sums stay in the first-level cache
    const T* rows = static_cast<const T*>(args.rows);
    for (int64_t t = first_token; t < last_token; ++t) {
        const int32_t* index = args.index + t * args.choices;
        const float* weights = args.weights + t * args.choices;
        T* out = static_cast<T*>(args.out) + t * args.hidden;
        for (int64_t begin = 0; begin < args.hidden; begin += kColumns) {
            const int64_t size = least(kColumns, args.hidden - begin);
            float sums[kColumns];
            for (int64_t c = 0; c < size; ++c) sums[c] = 0.0f;
            for (int64_t k = 0; k < args.choices; ++k) {
                if (index[k] < 0) continue;
                const T* row = rows + index[k] * args.row_stride + begin;
                const float weight = weights[k];
                for (int64_t c = 0; c < size; ++c) sums[c] += weight * widen(row[c]);
            }
            for (int64_t c = 0; c < size; ++c) narrow(sums[c], &out[begin + c]);
        }
    }
}

void combine(const epruntime::CombineArgs& args, int64_t first_token, int64_t last_token) {
    if (args.dtype == epruntime::DType::kFloat32)
        combine_tokens<float>(args, first_token, last_token);
    else
        combine_tokens<uint16_t>(args, first_token, last_token);
}

}  // namespace
