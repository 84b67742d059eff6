// BlockPool: which KV blocks are free, referenced, cached or in quarantine. Twin of epruntime/engine/block_pool.py,
// whose words explain it; both hand out the same blocks in the same order.
//
// Everything about a block lies in flat arrays by block id. A scheduler of many ranks comes back to each rank's
// books once per step, when they have long left the cache, so what counts is how few lines a call touches.

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace epruntime::kv {

using Block = std::int32_t;
using Token = std::int32_t;
using Content = std::uint64_t;

constexpr Content kNoContent = 0;

class BlockPool {
  public:
    // Throws std::invalid_argument, as all methods do where a call makes no sense.
    BlockPool(int num_blocks, int block_size, bool prefix_caching);

    int num_blocks() const { return static_cast<int>(refs_.size()); }
    int num_free() const { return static_cast<int>(free_.size()) + num_cached_; }

    // Appends `count` blocks with one reference each to `blocks`; evicts least recently used cached ones if needed.
    void allocate(int count, std::vector<Block>& blocks);
    // One more reference to each block.
    void share(std::span<const Block> blocks);
    // One reference fewer to each block, from the last to the first.
    void release_from_tail(std::span<const Block> blocks);
    // The same once `until_step` has ended.
    void quarantine_from_tail(std::span<const Block> blocks, std::int64_t until_step);
    void end_step(std::int64_t step);

    // Blocks of the quarantine, or of a table, that are referenced there only.
    int num_returning() const;
    int num_returning(std::span<const Block> table) const;

    // Offers a block, full and computed, for reuse; returns the content up to its end.
    Content publish(Block block, Content parent, const Token* tokens);
    // Appends the published blocks of the longest known prefix of `tokens` (whole blocks) to `blocks`.
    void match(std::span<const Token> tokens, std::vector<Block>& blocks) const;
    Content content_of(Block block) const { return content_[block]; }
    // Whether share(shared) and then allocate(count) would succeed.
    bool can_take(std::span<const Block> shared, int count) const;

  private:
    void release(Block block);
    void forget(Block block);
    void lru_append(Block block);
    void lru_remove(Block block);
    std::uint64_t hash(Content parent, const Token* tokens) const;
    Block find(std::uint64_t hash, Content parent, const Token* tokens) const;

    int block_size_;
    std::vector<std::int32_t> refs_;
    std::vector<Block> free_;  // a stack
    std::map<std::int64_t, std::vector<Block>> quarantine_;

    // Published and unreferenced blocks, in a ring through the sentinel num_blocks; next to evict first.
    std::vector<Block> lru_next_, lru_previous_;
    int num_cached_ = 0;

    // Published blocks by key: hash buckets, chained through `chain_`. Keys are compared in full.
    std::vector<Block> buckets_, chain_;
    std::vector<std::uint64_t> hash_;
    std::vector<Content> parent_, content_;  // content_ is kNoContent where a block is not published
    std::vector<Token> tokens_;              // [num_blocks, block_size]
    Content num_contents_ = kNoContent;
    std::uint64_t seed_;
};

}  // namespace epruntime::kv
