// KvCache: the token history and the block table of each request. Twin of epruntime/engine/kv_reference.py.
// What the methods mean is said once, in epruntime/engine/kv_cache.py.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "kv/block_pool.h"

namespace epruntime::kv {

using Rid = std::int64_t;

// A rid that was never added, or is forgotten.
struct UnknownRequest : std::out_of_range {
    explicit UnknownRequest(Rid rid) : std::out_of_range("unknown request"), rid(rid) {}
    Rid rid;
};

class KvCache {
  public:
    KvCache(int num_blocks, int block_size, bool prefix_caching);

    int num_blocks() const { return pool_.num_blocks(); }
    int block_size() const { return block_size_; }
    bool prefix_caching() const { return prefix_caching_; }
    int num_free_blocks() const { return pool_.num_free(); }

    void add(Rid rid, std::vector<Token> tokens);
    void forget(Rid rid);
    const std::vector<Token>& tokens(Rid rid) const { return at(rid).tokens; }
    const std::vector<Block>& table(Rid rid) const { return at(rid).blocks; }

    // Returns the indices of unknown rids.
    std::vector<std::size_t> append(std::span<const Rid> rids, std::span<const Token> tokens);
    bool can_admit(Rid rid, std::int64_t num_skippable) const;
    // Tokens found in the prefix cache; nothing where blocks are short.
    std::optional<std::size_t> admit(Rid rid, std::int64_t num_skippable);
    // One block for each; nothing where blocks are short.
    std::optional<std::vector<Block>> grow(std::span<const Rid> rids);
    void confirm(Rid rid, std::int64_t num_computed);
    void release(Rid rid, std::int64_t until_step);
    int num_returning(std::span<const Rid> rids) const;
    void end_step(std::int64_t step);

  private:
    struct Sequence {
        std::vector<Token> tokens;
        std::vector<Block> blocks;
        std::int64_t num_published = 0;
        Content content = kNoContent;
        std::int64_t publish_at;
    };
    struct Match {
        std::vector<Block> hits;
        int need;
    };

    const Sequence& at(Rid rid) const;
    Sequence& at(Rid rid) { return const_cast<Sequence&>(static_cast<const KvCache*>(this)->at(rid)); }
    Match match(const Sequence& sequence, std::int64_t num_skippable) const;
    void publish(Sequence& sequence, std::int64_t num_computed);

    int block_size_;
    bool prefix_caching_;
    BlockPool pool_;
    std::unordered_map<Rid, Sequence> sequences_;
    std::int64_t ended_step_ = -1;
};

}  // namespace epruntime::kv
