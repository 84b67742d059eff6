#include "cpu/rows.h"

#include <cstring>

namespace epruntime {

void write_kv_rows(const CacheWrite& args, int64_t first_row, int64_t last_row) {
    const bool whole = args.x_head_stride == args.head_bytes && args.head_stride == args.head_bytes;
    const int64_t pieces = whole ? 1 : args.heads, bytes = whole ? args.heads * args.head_bytes : args.head_bytes;
    for (int64_t t = first_row; t < last_row; ++t) {
        const int64_t slot = args.slots[t];
        if (slot < 0) continue;
        const char* from = args.x + t * args.x_row_stride;
        char* to = args.cache + slot / args.block_size * args.block_stride + slot % args.block_size * args.slot_stride;
        for (int64_t h = 0; h < pieces; ++h)
            std::memcpy(to + h * args.head_stride, from + h * args.x_head_stride, static_cast<size_t>(bytes));
    }
}

void pack_rows(const RowPack& args, int64_t first_row, int64_t last_row) {
    const int64_t slots_end = args.slots_at + args.slots_row_bytes;
    for (int64_t n = first_row; n < last_row; ++n) {
        char* to = args.message + n * args.row_bytes;
        std::memcpy(to, args.x + args.token[n] * args.x_row_stride, static_cast<size_t>(args.x_row_bytes));
        std::memset(to + args.x_row_bytes, 0, static_cast<size_t>(args.slots_at - args.x_row_bytes));
        std::memcpy(to + args.slots_at, args.slots + n * args.slots_row_stride,
                    static_cast<size_t>(args.slots_row_bytes));
        std::memset(to + slots_end, 0, static_cast<size_t>(args.row_bytes - slots_end));
    }
}

}  // namespace epruntime
