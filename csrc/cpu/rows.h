// Moves of whole rows: nothing is computed, so there is one copy for all instruction sets.
#pragma once

#include <cstdint>

namespace epruntime {

// Row t of x (heads x size elements) goes to its slot of a paged cache. Sizes and strides in bytes.
struct CacheWrite {
    const char* x;
    int64_t x_row_stride;
    int64_t x_head_stride;
    char* cache;
    int64_t block_stride;
    int64_t slot_stride;
    int64_t head_stride;
    int64_t heads;
    int64_t head_bytes;
    int64_t block_size;
    const int64_t* slots;  // -1: skipped
};

void write_kv_rows(const CacheWrite& args, int64_t first_row, int64_t last_row);

// Message row n = x[token[n]], zeros up to slots_at, the slots, zeros up to row_bytes. Sizes and strides in bytes.
struct RowPack {
    const char* x;
    int64_t x_row_stride;
    int64_t x_row_bytes;
    const int64_t* token;
    const char* slots;
    int64_t slots_row_stride;
    int64_t slots_row_bytes;
    int64_t slots_at;
    int64_t row_bytes;
    char* message;
};

void pack_rows(const RowPack& args, int64_t first_row, int64_t last_row);

}  // namespace epruntime
