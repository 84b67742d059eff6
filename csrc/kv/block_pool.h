// BlockPool: which KV blocks are free, referenced, cached or in quarantine. Twin of epruntime/engine/block_pool.py,
// whose words explain it; both hand out the same blocks in the same order.
//
// All about a block lies in one cache line, beside its tokens. A scheduler of many ranks comes back to each rank's
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

    int num_blocks() const { return static_cast<int>(nodes_.size()) - 1; }
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
    Content content_of(Block block) const { return nodes_[block].content; }
    // Whether share(shared) and then allocate(count) would succeed.
    bool can_take(std::span<const Block> shared, int count) const;

  private:
    struct alignas(64) Node {
        std::int32_t refs = 0;
        Block chain = -1;  // next block of the same hash bucket
        // Neighbours among the published and unreferenced blocks, a ring in order of eviction through nodes_.back().
        Block next, previous;
        Content content = kNoContent;  // kNoContent where the block is not published
        Content parent = kNoContent;
        std::uint64_t hash = 0;
    };

    void release(Block block);
    void forget(Block block);
    void lru_append(Block block);
    void lru_remove(Block block);
    std::uint64_t hash(Content parent, const Token* tokens) const;
    Block find(std::uint64_t hash, Content parent, const Token* tokens) const;
    Block& bucket(std::uint64_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }

    int block_size_;
    std::vector<Node> nodes_;  // by block, and the ring's sentinel
    std::vector<Block> free_;  // a stack
    int num_cached_ = 0;
    std::map<std::int64_t, std::vector<Block>> quarantine_;

    // Of published blocks, whose keys are compared in full. Empty without a prefix cache.
    std::vector<Block> buckets_;
    std::vector<Token> tokens_;  // [num_blocks, block_size]
    Content num_contents_ = kNoContent;
    std::uint64_t seed_;
};

}  // namespace epruntime::kv
