#include "kv/block_pool.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

namespace epruntime::kv {

namespace {

constexpr Block kNone = -1;

std::uint64_t random_seed() {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32) | device();
}

std::string named(Block block) {
    return "KV block " + std::to_string(block);
}

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit.
std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

}  // namespace

BlockPool::BlockPool(int num_blocks, int block_size, bool prefix_caching)
    : block_size_(block_size), seed_(random_seed()) {
    if (num_blocks < 1) {
        throw std::invalid_argument("num_blocks=" + std::to_string(num_blocks) +
                                    ": a KV cache needs at least one block");
    }
    const auto count = static_cast<std::size_t>(num_blocks);
    refs_.assign(count, 0);
    free_.resize(count);
    for (int i = 0; i < num_blocks; ++i) free_[i] = num_blocks - 1 - i;  // block 0 goes first
    lru_next_.assign(count + 1, num_blocks);
    lru_previous_.assign(count + 1, num_blocks);
    content_.assign(count, kNoContent);
    if (!prefix_caching) return;
    buckets_.assign(std::bit_ceil(2 * count), kNone);
    chain_.assign(count, kNone);
    hash_.resize(count);
    parent_.resize(count);
    tokens_.resize(count * static_cast<std::size_t>(block_size));
}

void BlockPool::allocate(int count, std::vector<Block>& blocks) {
    if (count > num_free()) {
        throw std::invalid_argument(std::to_string(count) + " KV blocks asked, " + std::to_string(num_free()) + " of " +
                                    std::to_string(num_blocks()) + " free");
    }
    for (int i = 0; i < count; ++i) {
        Block block;
        if (!free_.empty()) {
            block = free_.back();
            free_.pop_back();
        } else {
            block = lru_next_[num_blocks()];
            lru_remove(block);
            forget(block);
        }
        refs_[block] = 1;
        blocks.push_back(block);
    }
}

void BlockPool::share(std::span<const Block> blocks) {
    for (const Block block : blocks) {
        if (refs_[block] == 0) {
            if (content_[block] == kNoContent) {
                throw std::invalid_argument(named(block) + " is free and has no content to share");
            }
            lru_remove(block);
        }
        ++refs_[block];
    }
}

void BlockPool::release(Block block) {
    if (refs_[block] < 1) throw std::invalid_argument(named(block) + " released more often than referenced");
    if (--refs_[block] > 0) return;
    if (content_[block] == kNoContent) {
        free_.push_back(block);
    } else {
        lru_append(block);
    }
}

void BlockPool::release_from_tail(std::span<const Block> blocks) {
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) release(*block);
}

void BlockPool::quarantine_from_tail(std::span<const Block> blocks, std::int64_t until_step) {
    auto& held = quarantine_[until_step];
    held.insert(held.end(), blocks.rbegin(), blocks.rend());
}

void BlockPool::end_step(std::int64_t step) {
    const auto held = quarantine_.find(step);
    if (held == quarantine_.end()) return;
    for (const Block block : held->second) release(block);
    quarantine_.erase(held);
}

int BlockPool::num_returning() const {
    int count = 0;
    for (const auto& [step, blocks] : quarantine_) count += num_returning(blocks);
    return count;
}

int BlockPool::num_returning(std::span<const Block> table) const {
    return static_cast<int>(std::ranges::count_if(table, [this](Block block) { return refs_[block] == 1; }));
}

Content BlockPool::publish(Block block, Content parent, const Token* tokens) {
    if (refs_[block] < 1) throw std::invalid_argument(named(block) + " is not referenced and cannot be published");
    const std::uint64_t key = hash(parent, tokens);
    if (const Block winner = find(key, parent, tokens); winner != kNone) return content_[winner];
    if (content_[block] != kNoContent) {
        throw std::invalid_argument(named(block) + " is published already, with another content");
    }
    hash_[block] = key;
    parent_[block] = parent;
    std::copy_n(tokens, block_size_, &tokens_[static_cast<std::size_t>(block) * block_size_]);
    Block& head = buckets_[key & (buckets_.size() - 1)];
    chain_[block] = head;
    head = block;
    return content_[block] = ++num_contents_;
}

void BlockPool::match(std::span<const Token> tokens, std::vector<Block>& blocks) const {
    Content content = kNoContent;
    for (std::size_t start = 0; start + block_size_ <= tokens.size(); start += block_size_) {
        const Token* own = &tokens[start];
        const Block block = find(hash(content, own), content, own);
        if (block == kNone) return;
        blocks.push_back(block);
        content = content_[block];
    }
}

bool BlockPool::can_take(std::span<const Block> shared, int count) const {
    const auto evictable = std::ranges::count_if(shared, [this](Block block) { return refs_[block] == 0; });
    return count + evictable <= num_free();
}

void BlockPool::forget(Block block) {
    Block* link = &buckets_[hash_[block] & (buckets_.size() - 1)];
    while (*link != block) link = &chain_[*link];
    *link = chain_[block];
    content_[block] = kNoContent;
}

void BlockPool::lru_append(Block block) {
    const Block end = num_blocks(), last = lru_previous_[end];
    lru_next_[last] = block;
    lru_previous_[block] = last;
    lru_next_[block] = end;
    lru_previous_[end] = block;
    ++num_cached_;
}

void BlockPool::lru_remove(Block block) {
    const Block next = lru_next_[block], previous = lru_previous_[block];
    lru_next_[previous] = next;
    lru_previous_[next] = previous;
    --num_cached_;
}

// Seeded, so that no client can choose prompts that all fall into one bucket.
std::uint64_t BlockPool::hash(Content parent, const Token* tokens) const {
    std::uint64_t state = mix(seed_ ^ parent);
    int i = 0;
    for (; i + 1 < block_size_; i += 2) {
        std::uint64_t pair;
        std::memcpy(&pair, tokens + i, sizeof pair);
        state = mix(state ^ pair);
    }
    if (i < block_size_) state = mix(state ^ static_cast<std::uint32_t>(tokens[i]));
    return state;
}

Block BlockPool::find(std::uint64_t hash, Content parent, const Token* tokens) const {
    Block block = buckets_[hash & (buckets_.size() - 1)];
    while (block != kNone) {
        const Token* own = &tokens_[static_cast<std::size_t>(block) * block_size_];
        if (hash_[block] == hash && parent_[block] == parent && std::equal(own, own + block_size_, tokens)) break;
        block = chain_[block];
    }
    return block;
}

}  // namespace epruntime::kv
