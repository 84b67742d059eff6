// How paged attention is cut into units of work. The cut decides who computes a row, never what comes out.
#pragma once

#include <vector>

#include "common/types.h"

namespace epruntime {

std::vector<AttentionUnit> plan_attention(const AttentionArgs& args);

}  // namespace epruntime
