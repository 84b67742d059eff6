#include "kv/block_pool.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

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
    nodes_.resize(count + 1);
    nodes_.back().next = nodes_.back().previous = num_blocks;
    free_.resize(count);
    for (int i = 0; i < num_blocks; ++i) free_[i] = num_blocks - 1 - i;  // block 0 goes first
    if (!prefix_caching) return;
    buckets_.assign(std::bit_ceil(2 * count), kNone);
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
            block = nodes_.back().next;
            lru_remove(block);
            forget(block);
        }
        nodes_[block].refs = 1;
        blocks.push_back(block);
    }
}

void BlockPool::share(std::span<const Block> blocks) {
    for (const Block block : blocks) {
        if (nodes_[block].refs == 0) {
            if (nodes_[block].content == kNoContent) {
                throw std::invalid_argument(named(block) + " is free and has no content to share");
            }
            lru_remove(block);
        }
        ++nodes_[block].refs;
    }
}

void BlockPool::release(Block block) {
    Node& node = nodes_[block];
    if (node.refs < 1) throw std::invalid_argument(named(block) + " released more often than referenced");
    if (--node.refs > 0) return;
    if (node.content == kNoContent) {
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
    return static_cast<int>(std::ranges::count_if(table, [this](Block block) { return nodes_[block].refs == 1; }));
}

Content BlockPool::publish(Block block, Content parent, const Token* tokens) {
    Node& node = nodes_[block];
    if (node.refs < 1) throw std::invalid_argument(named(block) + " is not referenced and cannot be published");
    const std::uint64_t key = hash(parent, tokens);
    if (const Block winner = find(key, parent, tokens); winner != kNone) return nodes_[winner].content;
    if (node.content != kNoContent) {
        throw std::invalid_argument(named(block) + " is published already, with another content");
    }
    node.hash = key;
    node.parent = parent;
    std::copy_n(tokens, block_size_, &tokens_[static_cast<std::size_t>(block) * block_size_]);
    node.chain = std::exchange(bucket(key), block);
    return node.content = ++num_contents_;
}

void BlockPool::match(std::span<const Token> tokens, std::vector<Block>& blocks) const {
    Content content = kNoContent;
    for (std::size_t start = 0; start + block_size_ <= tokens.size(); start += block_size_) {
        const Token* own = &tokens[start];
        const Block block = find(hash(content, own), content, own);
        if (block == kNone) return;
        blocks.push_back(block);
        content = nodes_[block].content;
    }
}

bool BlockPool::can_take(std::span<const Block> shared, int count) const {
    const auto evictable = std::ranges::count_if(shared, [this](Block block) { return nodes_[block].refs == 0; });
    return count + evictable <= num_free();
}

void BlockPool::forget(Block block) {
    Node& node = nodes_[block];
    Block* link = &bucket(node.hash);
    while (*link != block) link = &nodes_[*link].chain;
    *link = node.chain;
    node.content = kNoContent;
}

void BlockPool::lru_append(Block block) {
    const Block end = num_blocks(), last = nodes_[end].previous;
    nodes_[last].next = nodes_[end].previous = block;
    nodes_[block].next = end;
    nodes_[block].previous = last;
    ++num_cached_;
}

void BlockPool::lru_remove(Block block) {
    const Block next = nodes_[block].next, previous = nodes_[block].previous;
    nodes_[previous].next = next;
    nodes_[next].previous = previous;
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
        const Node& node = nodes_[block];
        const Token* own = &tokens_[static_cast<std::size_t>(block) * block_size_];
        if (node.hash == hash && node.parent == parent && std::equal(own, own + block_size_, tokens)) break;
        block = node.chain;
    }
    return block;
}

}  // namespace epruntime::kv
