// How products are shared out: blocks of columns, and of rows where columns are few. Never parts of k.
#pragma once

#include <vector>

#include "common/types.h"

namespace epruntime {

// Units of whole products, cut for `threads` threads. Where they are cut changes no bit.
std::vector<GemmUnit> plan_gemm(const GemmArgs& args, const std::vector<GemmUnit>& products, int64_t threads);

}  // namespace epruntime
