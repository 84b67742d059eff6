#include "cpu/gemm_plan.h"

#include <algorithm>

namespace epruntime {

namespace {

// A multiple of every instruction set's tile in both directions.
constexpr int64_t kBlock = 12;
// Columns of a unit: few enough that a chunk of them, and the sums of many rows, stay in a core's second-level cache.
constexpr int64_t kLeastColumns = 48, kMostColumns = 192, kSumsOfFewRows = 6144;
constexpr int64_t kUnitsPerThread = 3;

int64_t blocks(int64_t n) {
    return (n + kBlock - 1) / kBlock * kBlock;
}

}  // namespace

std::vector<GemmUnit> plan_gemm(const GemmArgs& args, const std::vector<GemmUnit>& products, int64_t threads) {
    const int64_t element = args.dtype == DType::kFloat32 ? 4 : 2, num_products = static_cast<int64_t>(products.size());
    std::vector<GemmUnit> units;
    if (products.empty() || args.columns == 0) return units;
    const int64_t wanted = threads > 1 ? kUnitsPerThread * threads : 1;
    int64_t most_rows = 1;
    for (const GemmUnit& product : products) most_rows = std::max(most_rows, product.num_rows);
    int64_t columns = std::clamp(kSumsOfFewRows / most_rows / kBlock * kBlock, kLeastColumns, kMostColumns);
    columns = std::min(columns, blocks((args.columns * num_products + wanted - 1) / wanted));
    const int64_t column_blocks = (args.columns + columns - 1) / columns * num_products;
    const int64_t row_blocks = (wanted + column_blocks - 1) / column_blocks;
    for (const GemmUnit& product : products) {
        const int64_t rows = blocks((product.num_rows + row_blocks - 1) / row_blocks);
        for (int64_t column = 0; column < args.columns; column += columns)
            for (int64_t row = 0; row < product.num_rows; row += rows) {
                GemmUnit unit = product;
                unit.a = static_cast<const char*>(product.a) + row * args.a_row_stride * element;
                unit.out = static_cast<char*>(product.out) + row * args.out_row_stride * element;
                unit.num_rows = std::min(rows, product.num_rows - row);
                unit.first_column = column;
                unit.num_columns = std::min(columns, args.columns - column);
                units.push_back(unit);
            }
    }
    return units;
}

}  // namespace epruntime
