// Paged attention: query rows -> scores of a partition -> its own softmax parts -> merged in ascending order.
//
// A row's bits depend on its own query, its keys and values, and their positions alone:
//  - keys come in partitions that start at multiples of kPartition, whatever the number of query rows;
//  - a score is a dot product over the head's lanes in ascending order, then one tree over the lanes;
//  - a partition's sum runs per lane of (position mod kLanes), then the same tree; its values are added key by key;
//  - partitions are merged in ascending order.
// Rows are worked on together only to read keys and values once; they never mix. Keys that a row does not see are
// skipped, not multiplied by zero, so that unwritten pages may hold NaN. Partitions know nothing of one another before
// the merge: splitting them among threads would not change a bit.
#pragma once

#include "common/types.h"
#include "cpu/simd.h"

namespace {

using epruntime::AttentionArgs;
using epruntime::AttentionUnit;
using epruntime::kPartition;
using epruntime::kUnitRows;
using epruntime::PagedView;

// Scores come in tiles of kTileRows rows x 4 keys, whose kLanes accumulators sum_each turns into one vector.
constexpr int kTileKeys = 4;
constexpr int kTileRows = kLanes / kTileKeys;
// Values are added in tiles of kValueRows rows x kValueVecs vectors, sized for the registers there are.
constexpr int kValueRows = 4;
constexpr int kValueVecs = kLanes == 16 ? 4 : 2;
// Keys are fetched, and copied where need be, by so many at a time; it divides kPartition.
constexpr int64_t kStretch = 32;
constexpr float kMinusInfinity = -__builtin_inff();

struct RowState {
    int64_t begin;  // first key seen
    int64_t end;    // one past the last
    float peak;
    float sum;
};

// Parts of the scratch memory; sizes in floats.
struct Scratch {
    int64_t key_width, value_width;  // head sizes rounded up to whole vectors
    float *q, *out, *part, *scores, *copies, *zeros;

    static int64_t floats(const AttentionArgs& args) {
        const int64_t key = round_up(args.keys.size, kLanes), value = round_up(args.values.size, kLanes);
        return kUnitRows * (key + 2 * value + kPartition) + kStretch * most(key, value) + key;
    }

    Scratch(const AttentionArgs& args, float* base)
        : key_width(round_up(args.keys.size, kLanes)), value_width(round_up(args.values.size, kLanes)) {
        q = base;
        out = q + kUnitRows * key_width;
        part = out + kUnitRows * value_width;
        scores = part + kUnitRows * value_width;
        copies = scores + kUnitRows * kPartition;
        zeros = copies + kStretch * most(key_width, value_width);
        for (int64_t i = 0; i < key_width; ++i) zeros[i] = 0.0f;
    }
};

// Addresses of the rows begin .. end of a sequence.
template <typename T>
void address(const AttentionArgs& args, const AttentionUnit& unit, const PagedView& view, int64_t begin, int64_t end,
             const T** rows) {
    const int32_t* table = args.block_tables + unit.seq * args.table_stride;
    const T* head = static_cast<const T*>(view.data) + unit.kv_head * view.head_stride;
    int64_t block = begin / args.block_size, slot = begin % args.block_size;
    for (int64_t key = begin; key < end; ++key) {
        *rows++ = head + table[block] * view.block_stride + slot * view.slot_stride;
        if (++slot == args.block_size) {
            slot = 0;
            ++block;
        }
    }
}

// Asks for rows to be read a little later: pages lie anywhere, and a head's rows are short pieces of them, which no
// hardware prefetcher follows.
template <typename T>
void prefetch(const T* const* rows, int64_t begin, int64_t end, int64_t size) {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t j = begin; j < end; ++j)
        for (int64_t i = 0; i < size; i += kLine) __builtin_prefetch(rows[j] + i);
}

// Where rows lie as fp32 rows of whole vectors: in the cache itself, or copied.
template <typename T>
void locate(const T* const* rows, int64_t count, int64_t size, float* copies, int64_t width, const float** pointers) {
    const bool in_place = sizeof(T) == sizeof(float) && size == width;
    for (int64_t i = 0; i < count; ++i) {
        if (in_place) {
            pointers[i] = reinterpret_cast<const float*>(rows[i]);
        } else {
            widen_row(rows[i], size, copies + i * width, width);
            pointers[i] = copies + i * width;
        }
    }
}

// scores[r][j] = scale * q[r] . keys[j] for kTileRows rows and kTileKeys keys.
inline void score_tile(const float* q, int64_t width, const float* const* keys, float scale, float* scores) {
    Vec sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = splat(0.0f);
    const float *key0 = keys[0], *key1 = keys[1], *key2 = keys[2], *key3 = keys[3];
    for (int64_t d = 0; d < width; d += kLanes) {
        const Vec k0 = load(key0 + d), k1 = load(key1 + d), k2 = load(key2 + d), k3 = load(key3 + d);
        for (int r = 0; r < kTileRows; ++r) {
            const Vec x = load(q + r * width + d);
            sums[r * kTileKeys + 0] = fma(x, k0, sums[r * kTileKeys + 0]);
            sums[r * kTileKeys + 1] = fma(x, k1, sums[r * kTileKeys + 1]);
            sums[r * kTileKeys + 2] = fma(x, k2, sums[r * kTileKeys + 2]);
            sums[r * kTileKeys + 3] = fma(x, k3, sums[r * kTileKeys + 3]);
        }
    }
    float tile[kLanes];
    store(tile, mul(sum_each(sums), splat(scale)));
    for (int r = 0; r < kTileRows; ++r)
        std::memcpy(scores + r * kPartition, tile + r * kTileKeys, kTileKeys * sizeof(float));
}

// The row's scores begin .. end (within the partition) become exp(score - peak).
inline void softmax_part(float* scores, int64_t begin, int64_t end, float softcap, float* peak, float* sum) {
    const int64_t first = begin / kLanes * kLanes, last = round_up(end, kLanes);
    if (softcap != 0.0f)
        for (int64_t j = first; j < last; j += kLanes) store(scores + j, soft_cap(load(scores + j), softcap));
    for (int64_t j = first; j < begin; ++j) scores[j] = kMinusInfinity;
    for (int64_t j = end; j < last; ++j) scores[j] = kMinusInfinity;
    Vec peaks = splat(kMinusInfinity);
    for (int64_t j = first; j < last; j += kLanes) peaks = max(load(scores + j), peaks);
    *peak = max_lanes(peaks);
    const Vec shift = splat(*peak);
    Vec sums = splat(0.0f);
    for (int64_t j = first; j < last; j += kLanes) {
        const Vec p = exp_nonpositive(sub(load(scores + j), shift));
        store(scores + j, p);
        sums = add(sums, p);
    }
    *sum = sum_lanes(sums);
}

// part[r] += p[r][j] * values[j] for keys begin .. end of a stretch in ascending order.
template <int kRows, int kVecs>
inline void add_values(const float* p, const float* const* values, int64_t begin, int64_t end, int64_t column,
                       float* part, int64_t width) {
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kVecs; ++c) sums[r][c] = load(part + r * width + column + c * kLanes);
    for (int64_t j = begin; j < end; ++j) {
        Vec value[kVecs];
        for (int c = 0; c < kVecs; ++c) value[c] = load(values[j] + column + c * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vec weight = splat(p[r * kPartition + j]);
            for (int c = 0; c < kVecs; ++c) sums[r][c] = fma(weight, value[c], sums[r][c]);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kVecs; ++c) store(part + r * width + column + c * kLanes, sums[r][c]);
}

struct Range {
    int64_t begin, end;

    Range within(int64_t first, int64_t last) const { return {most(begin, first), least(end, last)}; }
    bool empty() const { return begin >= end; }
};

// One column strip of all rows: rows in groups over the keys that all of the group see, each row's own ends apart.
template <int kVecs>
void add_values_strip(const float* p, const float* const* values, const Range* ranges, int64_t num_rows, int64_t column,
                      float* part, int64_t width) {
    const auto add_one = [&](int64_t r, int64_t begin, int64_t end) {
        if (begin < end) add_values<1, kVecs>(p + r * kPartition, values, begin, end, column, part + r * width, width);
    };
    int64_t r = 0;
    for (; r + kValueRows <= num_rows; r += kValueRows) {
        Range common = ranges[r];
        for (int i = 1; i < kValueRows; ++i) common = common.within(ranges[r + i].begin, ranges[r + i].end);
        if (common.empty()) {
            for (int i = 0; i < kValueRows; ++i) add_one(r + i, ranges[r + i].begin, ranges[r + i].end);
            continue;
        }
        for (int i = 0; i < kValueRows; ++i) add_one(r + i, ranges[r + i].begin, common.begin);
        add_values<kValueRows, kVecs>(p + r * kPartition, values, common.begin, common.end, column, part + r * width,
                                      width);
        for (int i = 0; i < kValueRows; ++i) add_one(r + i, common.end, ranges[r + i].end);
    }
    for (; r < num_rows; ++r) add_one(r, ranges[r].begin, ranges[r].end);
}

// (peak, sum, out) of a row, merged with those of the next partition.
inline void merge(RowState* row, float* out, float peak, float sum, const float* part, int64_t width) {
    const float new_peak = peak > row->peak ? peak : row->peak;
    const float old_factor = exp_nonpositive(row->peak - new_peak), new_factor = exp_nonpositive(peak - new_peak);
    row->sum = row->sum * old_factor + sum * new_factor;
    row->peak = new_peak;
    const Vec old_scale = splat(old_factor), new_scale = splat(new_factor);
    for (int64_t c = 0; c < width; c += kLanes)
        store(out + c, fma(load(out + c), old_scale, mul(load(part + c), new_scale)));
}

// The rows of one unit, on their way through the partitions.
template <typename T>
class UnitRows {
  public:
    UnitRows(const AttentionArgs& args, const AttentionUnit& unit, float* scratch_floats)
        : args_(args),
          unit_(unit),
          scratch_(args, scratch_floats),
          group_(args.num_heads / args.num_kv_heads),
          start_(args.query_starts[unit.seq]),
          padded_rows_(round_up(unit.num_rows, kTileRows)) {
        const int64_t queries = args.query_starts[unit.seq + 1] - start_;
        const int64_t first_position = args.seq_lens[unit.seq] - queries;
        for (int64_t r = 0; r < unit.num_rows; ++r) {
            const int64_t position = first_position + query(r);
            int64_t first = 0;
            if (args.window) first = most(first, position - args.window + 1);
            if (args.chunk) first = most(first, position / args.chunk * args.chunk);
            rows_[r] = {first, position + 1, kMinusInfinity, 0.0f};
            begin_ = least(begin_, first);
            end_ = most(end_, position + 1);
            const T* q =
                static_cast<const T*>(args.q) + (start_ + query(r)) * args.q_row_stride + head(r) * args.q_head_stride;
            widen_row(q, args.keys.size, scratch_.q + r * scratch_.key_width, scratch_.key_width);
        }
        for (int64_t i = unit.num_rows * scratch_.key_width; i < padded_rows_ * scratch_.key_width; ++i)
            scratch_.q[i] = 0.0f;
        for (int64_t i = 0; i < unit.num_rows * scratch_.value_width; ++i) scratch_.out[i] = 0.0f;
    }

    void run() {
        for (int64_t base = begin_ / kPartition * kPartition; base < end_; base += kPartition) {
            live_ = Range{begin_ - base, end_ - base}.within(0, kPartition);
            for (int64_t r = 0; r < unit_.num_rows; ++r)
                ranges_[r] = Range{rows_[r].begin - base, rows_[r].end - base}.within(0, kPartition);
            const T* value_rows[kPartition];
            address(args_, unit_, args_.values, base + live_.begin, base + live_.end, value_rows + live_.begin);
            score(base, value_rows);
            float peaks[kUnitRows], sums[kUnitRows];
            for (int64_t r = 0; r < unit_.num_rows; ++r)
                if (!ranges_[r].empty())
                    softmax_part(scratch_.scores + r * kPartition, ranges_[r].begin, ranges_[r].end, args_.softcap,
                                 &peaks[r], &sums[r]);
            add(value_rows);
            for (int64_t r = 0; r < unit_.num_rows; ++r)
                if (!ranges_[r].empty())
                    merge(&rows_[r], scratch_.out + r * scratch_.value_width, peaks[r], sums[r],
                          scratch_.part + r * scratch_.value_width, scratch_.value_width);
        }
        write();
    }

  private:
    int64_t query(int64_t r) const { return (unit_.first_row + r) / group_; }
    int64_t head(int64_t r) const { return unit_.kv_head * group_ + (unit_.first_row + r) % group_; }

    // Scores of the partition's live keys. Fetches the next keys and these keys' values meanwhile.
    void score(int64_t base, const T* const* value_rows) {
        const int64_t ahead = least(live_.end + kStretch, end_ - base);
        const T* key_rows[kPartition + kStretch];
        address(args_, unit_, args_.keys, base + live_.begin, base + ahead, key_rows + live_.begin);
        for (int64_t first = live_.begin / kStretch * kStretch; first < live_.end; first += kStretch) {
            const Range here = live_.within(first, first + kStretch);
            const float* keys[kStretch];
            for (int64_t j = 0; j < kStretch; ++j) keys[j] = scratch_.zeros;
            locate(key_rows + here.begin, here.end - here.begin, args_.keys.size, scratch_.copies, scratch_.key_width,
                   keys + here.begin - first);
            for (int64_t j = first; j < here.end; j += kTileKeys) {
                const Range tile = here.within(j, j + kTileKeys);
                prefetch(key_rows, tile.begin + kStretch, least(tile.end + kStretch, ahead), args_.keys.size);
                prefetch(value_rows, tile.begin, tile.end, args_.values.size);
                for (int64_t r = 0; r < padded_rows_; r += kTileRows)
                    if (any_sees(r, j))
                        score_tile(scratch_.q + r * scratch_.key_width, scratch_.key_width, keys + j - first,
                                   args_.scale, scratch_.scores + r * kPartition + j);
            }
        }
    }

    // Does a row of the tile at r see a key of the tile at j?
    bool any_sees(int64_t r, int64_t j) const {
        bool seen = false;
        for (int64_t i = r; i < least(r + kTileRows, unit_.num_rows); ++i)
            seen |= !ranges_[i].within(j, j + kTileKeys).empty();
        return seen;
    }

    // The partition's values, weighted, into scratch.part.
    void add(const T* const* value_rows) {
        const int64_t width = scratch_.value_width;
        for (int64_t i = 0; i < unit_.num_rows * width; ++i) scratch_.part[i] = 0.0f;
        for (int64_t first = live_.begin / kStretch * kStretch; first < live_.end; first += kStretch) {
            const Range here = live_.within(first, first + kStretch);
            const float* values[kStretch];
            locate(value_rows + here.begin, here.end - here.begin, args_.values.size, scratch_.copies, width,
                   values + here.begin - first);
            Range stretch[kUnitRows];
            for (int64_t r = 0; r < unit_.num_rows; ++r) {
                const Range range = ranges_[r].within(first, first + kStretch);
                stretch[r] = {range.begin - first, range.end - first};
            }
            const float* p = scratch_.scores + first;
            int64_t column = 0;
            for (; column + kValueVecs * kLanes <= width; column += kValueVecs * kLanes)
                add_values_strip<kValueVecs>(p, values, stretch, unit_.num_rows, column, scratch_.part, width);
            for (; column < width; column += kLanes)
                add_values_strip<1>(p, values, stretch, unit_.num_rows, column, scratch_.part, width);
        }
    }

    void write() {
        for (int64_t r = 0; r < unit_.num_rows; ++r) {
            const float* out = scratch_.out + r * scratch_.value_width;
            float scale = 1.0f;
            if (args_.sinks) {  // one more key, with no value
                const float sink = args_.sinks[head(r)], peak = sink > rows_[r].peak ? sink : rows_[r].peak;
                scale = exp_nonpositive(rows_[r].peak - peak);
                rows_[r].sum = rows_[r].sum * scale + exp_nonpositive(sink - peak);
            }
            const int64_t row = (start_ + query(r)) * args_.num_heads + head(r);
            T* target = static_cast<T*>(args_.out) + row * args_.values.size;
            for (int64_t c = 0; c < args_.values.size; ++c) narrow(out[c] * scale / rows_[r].sum, &target[c]);
        }
    }

    const AttentionArgs& args_;
    const AttentionUnit& unit_;
    const Scratch scratch_;
    const int64_t group_;
    const int64_t start_;  // the sequence's first query row
    const int64_t padded_rows_;
    RowState rows_[kUnitRows];
    int64_t begin_ = INT64_MAX, end_ = 0;  // keys that any row sees
    Range live_;                           // those of the current partition, and each row's, counted from its base
    Range ranges_[kUnitRows];
};

size_t attention_scratch_floats(const AttentionArgs& args) {
    return static_cast<size_t>(Scratch::floats(args));
}

void attention_unit(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
    if (args.dtype == epruntime::DType::kFloat32)
        UnitRows<float>(args, unit, scratch).run();
    else
        UnitRows<uint16_t>(args, unit, scratch).run();
}

}  // namespace
