#include "kv/kv_cache.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace epruntime::kv {

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

int checked_block_size(int block_size) {
    if (block_size < 1) {
        throw std::invalid_argument("block_size=" + std::to_string(block_size) + ": must be at least 1");
    }
    return block_size;
}

}  // namespace

KvCache::KvCache(int num_blocks, int block_size, bool prefix_caching)
    : block_size_(checked_block_size(block_size)),
      prefix_caching_(prefix_caching),
      pool_(num_blocks, block_size, prefix_caching) {}

const KvCache::Sequence& KvCache::at(Rid rid) const {
    const auto found = sequences_.find(rid);
    if (found == sequences_.end()) throw UnknownRequest(rid);
    return found->second;
}

void KvCache::add(Rid rid, std::vector<Token> tokens) {
    const auto [place, is_new] = sequences_.try_emplace(rid);
    if (!is_new) throw std::invalid_argument("rid=" + std::to_string(rid) + " is in use");
    place->second.tokens = std::move(tokens);
    place->second.publish_at = kNever;
}

void KvCache::forget(Rid rid) {
    if (!at(rid).blocks.empty()) {
        throw std::invalid_argument("request " + std::to_string(rid) + " still has a block table");
    }
    sequences_.erase(rid);
}

std::vector<std::size_t> KvCache::append(std::span<const Rid> rids, std::span<const Token> tokens) {
    std::vector<std::size_t> unknown;
    for (std::size_t i = 0; i < rids.size(); ++i) {
        const auto found = sequences_.find(rids[i]);
        if (found == sequences_.end()) {
            unknown.push_back(i);
            continue;
        }
        Sequence& sequence = found->second;
        const auto num_computed = static_cast<std::int64_t>(sequence.tokens.size());
        if (num_computed >= sequence.publish_at) publish(sequence, num_computed);
        sequence.tokens.push_back(tokens[i]);
    }
    return unknown;
}

bool KvCache::can_admit(Rid rid, std::int64_t num_skippable) const {
    const Match found = match(at(rid), num_skippable);
    return pool_.can_take(found.hits, found.need);
}

std::optional<std::size_t> KvCache::admit(Rid rid, std::int64_t num_skippable) {
    Sequence& sequence = at(rid);
    if (!sequence.blocks.empty()) {
        throw std::invalid_argument("request " + std::to_string(rid) + " has a block table already");
    }
    Match found = match(sequence, num_skippable);
    if (!pool_.can_take(found.hits, found.need)) return std::nullopt;
    const std::size_t num_hits = found.hits.size();
    pool_.share(found.hits);  // first: allocating may evict cached blocks
    sequence.content = num_hits ? pool_.content_of(found.hits.back()) : kNoContent;
    sequence.blocks = std::move(found.hits);
    pool_.allocate(found.need, sequence.blocks);
    sequence.num_published = static_cast<std::int64_t>(num_hits);
    sequence.publish_at = prefix_caching_ ? (sequence.num_published + 1) * block_size_ : kNever;
    return num_hits * static_cast<std::size_t>(block_size_);
}

std::optional<std::vector<Block>> KvCache::grow(std::span<const Rid> rids) {
    if (rids.size() > static_cast<std::size_t>(pool_.num_free())) return std::nullopt;
    std::vector<Block> blocks;
    pool_.allocate(static_cast<int>(rids.size()), blocks);
    for (std::size_t i = 0; i < rids.size(); ++i) at(rids[i]).blocks.push_back(blocks[i]);
    return blocks;
}

void KvCache::confirm(Rid rid, std::int64_t num_computed) {
    Sequence& sequence = at(rid);
    if (num_computed >= sequence.publish_at) publish(sequence, num_computed);
}

void KvCache::release(Rid rid, std::int64_t until_step) {
    Sequence& sequence = at(rid);
    if (until_step <= ended_step_) {
        pool_.release_from_tail(sequence.blocks);
    } else {
        pool_.quarantine_from_tail(sequence.blocks, until_step);
    }
    sequence.blocks.clear();
    sequence.num_published = 0;
    sequence.content = kNoContent;
    sequence.publish_at = kNever;
}

int KvCache::num_returning(std::span<const Rid> rids) const {
    int count = pool_.num_returning();
    for (const Rid rid : rids) count += pool_.num_returning(at(rid).blocks);
    return count;
}

void KvCache::end_step(std::int64_t step) {
    ended_step_ = step;
    pool_.end_step(step);
}

KvCache::Match KvCache::match(const Sequence& sequence, std::int64_t num_skippable) const {
    const auto num_tokens = static_cast<std::int64_t>(sequence.tokens.size());
    Match found;
    if (prefix_caching_) {
        // the last token is always computed: it yields the next one
        const std::int64_t end = std::min(num_tokens - 1, num_skippable) / block_size_ * block_size_;
        pool_.match(std::span(sequence.tokens).first(static_cast<std::size_t>(end)), found.hits);
    }
    found.need = static_cast<int>((num_tokens + block_size_ - 1) / block_size_) - static_cast<int>(found.hits.size());
    return found;
}

void KvCache::publish(Sequence& sequence, std::int64_t num_computed) {
    const std::int64_t full = num_computed / block_size_;
    if (full > static_cast<std::int64_t>(std::min(sequence.blocks.size(), sequence.tokens.size() / block_size_))) {
        throw std::invalid_argument(std::to_string(num_computed) + " tokens cannot be computed, with " +
                                    std::to_string(sequence.tokens.size()) + " known and " +
                                    std::to_string(sequence.blocks.size()) + " blocks for them");
    }
    for (std::int64_t i = sequence.num_published; i < full; ++i) {
        sequence.content = pool_.publish(sequence.blocks[i], sequence.content, &sequence.tokens[i * block_size_]);
    }
    sequence.num_published = full;
    sequence.publish_at = (full + 1) * block_size_;
}

}  // namespace epruntime::kv
