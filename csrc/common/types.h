// What the kernels are handed: plain pointers, sizes and strides, already checked by the binding.
#pragma once

#include <cstdint>

namespace epruntime {

enum class DType : int { kFloat32, kBFloat16 };

// A paged cache [blocks, block_size, heads, size]; strides in elements, the last dimension contiguous.
struct PagedView {
    const void* data;
    int64_t block_stride;
    int64_t slot_stride;
    int64_t head_stride;
    int64_t size;
};

struct AttentionArgs {
    DType dtype;
    const void* q;  // [rows, num_heads, keys.size]
    int64_t q_row_stride;
    int64_t q_head_stride;
    void* out;  // [rows, num_heads, values.size], contiguous
    PagedView keys;
    PagedView values;
    int64_t block_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t num_seqs;
    const int32_t* block_tables;  // [num_seqs, ...]
    int64_t table_stride;
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* seq_lens;      // [num_seqs]
    int64_t window;               // 0: none
    int64_t chunk;                // 0: none
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [num_heads], or null
};

// One piece of attention: `num_rows` (position, head of the group) rows of one sequence and one KV head.
// Row r is the query at r / group of the sequence's queries, head r % group of the KV head's group.
struct AttentionUnit {
    int64_t seq;
    int64_t kv_head;
    int64_t first_row;
    int64_t num_rows;
};

struct CombineArgs {
    DType dtype;
    const void* rows;  // [.., hidden]
    int64_t row_stride;
    const int32_t* index;  // [tokens, choices], -1 absent
    const float* weights;  // [tokens, choices]
    void* out;             // [tokens, hidden], contiguous
    int64_t choices;
    int64_t hidden;
};

// Products a . b of one shape of b and its own rows each; elements of a row of a are adjacent.
struct GemmArgs {
    DType dtype;
    int64_t columns;       // N
    int64_t depth;         // K
    int64_t a_row_stride;  // in elements, as are all strides
    // Column n of b begins at n * b_stride and is contiguous; or, if b_row_major, row k does at k * b_stride.
    bool b_row_major;
    int64_t b_stride;
    int64_t out_row_stride;
};

// One product: rows of a times b, or a share of it.
struct GemmUnit {
    const void* a;      // [num_rows, K]
    const void* b;      // [K, N]
    const float* bias;  // [N], or null
    void* out;          // [num_rows, N]
    int64_t num_rows;
    int64_t first_column;
    int64_t num_columns;
};

// Keys are worked on in partitions that start at multiples of this. Changing it changes bits, not meaning.
constexpr int64_t kPartition = 128;
// Rows of one AttentionUnit at most.
constexpr int64_t kUnitRows = 32;

}  // namespace epruntime
