#include "cpu/attention_plan.h"

#include <algorithm>

namespace epruntime {

std::vector<AttentionUnit> plan_attention(const AttentionArgs& args) {
    const int64_t group = args.num_heads / args.num_kv_heads;
    std::vector<AttentionUnit> units;
    for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
        const int64_t rows = (args.query_starts[seq + 1] - args.query_starts[seq]) * group;
        for (int64_t first = 0; first < rows; first += kUnitRows)
            for (int64_t head = 0; head < args.num_kv_heads; ++head)
                units.push_back({seq, head, first, std::min(kUnitRows, rows - first)});
    }
    // Threads take units one after the other: the longest first, so that none is left alone with one at the end.
    std::stable_sort(units.begin(), units.end(), [&](const AttentionUnit& a, const AttentionUnit& b) {
        return args.seq_lens[a.seq] * a.num_rows > args.seq_lens[b.seq] * b.num_rows;
    });
    return units;
}

}  // namespace epruntime
