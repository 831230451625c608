// The K and V of one KV head for a chunk of CHUNK tokens, packed: in place if the cache is packed, else by ChunkPacker.
//
// A register of K holds one packed element of LANES tokens, so that a score is a sum in one lane, in order. A register
// of V holds LANES elements of one token, in bfloat16 each paired with that of the next token.

#pragma once

#include <algorithm>
#include <vector>

#include "pack_chunk.h"
#include "packed_pairs.h"
#include "token_locations.h"

namespace pagedbatch {

//! Passes over a chunk, TILE_VECS registers of tokens (of K) or of elements (of V) at a time.
constexpr int NUM_PASSES = CHUNK / (TILE_VECS * LANES);

//! One KV head of a chunk.
template <class T>
class KvChunk {
 public:
  explicit KvChunk(const AttentionArgs& args)
      : args_(args),
        packer_(args),
        packed_head_size_(round_up(args.cache.head_size, PAIR<T>) / PAIR<T>),
        key_stride_(args.cache.is_packed ? args.cache.block_size : CHUNK),
        last_line_(GROUP / PAIR<T> * args.cache.head_size - GROUP),
        masked_pairs_(2 * args.cache.head_size) {}

  //! Packed elements per key.
  int packed_head_size() const { return packed_head_size_; }
  //! The first packed element of the LANES keys from the `i`-th on; the next one of each is `key_stride` further.
  const uint32_t* keys(int i) const { return keys_[i / LANES]; }
  int64_t key_stride() const { return key_stride_; }
  //! The packed elements of the values of the PAIR tokens from `i` on; 0 for a token that is not read.
  const uint32_t* values(int i) const { return values_[i / PAIR<T>]; }

  //! Points `keys` and `values` to `tokens` of KV head `head`. What comes `next` is prefetched, see `prefetch_share`.
  void load(const TokenLocations& tokens, int head, const TokenLocations& next, int next_head) {
    if (!args_.cache.is_packed) return packer_.pack(tokens, head, next, next_head, keys_, values_);
    locate_keys(tokens, head);
    locate_values(tokens, head);
    locate_next(next, next_head);
  }

  //! Selects the `i`-th of `count` parts of what comes next for `prefetch_keys` and `prefetch_values`.
  void prefetch_share(int i, int count) {
    const int size = (CHUNK / GROUP + count - 1) / count;
    prefetch_begin_ = std::min(i * size, num_next_);
    prefetch_end_ = std::min(prefetch_begin_ + size, num_next_);
  }

  //! Prefetch one cache line per group of the part: that of the `i`-th packed element of the keys, or the `i`-th line
  //! of the values. Spread over NUM_PASSES passes, because too many prefetches at once would wait for each other.
  __attribute__((always_inline)) void prefetch_keys(int i, int pass) const {
    for (int group = prefetch_begin_ + pass; group < prefetch_end_; group += NUM_PASSES) {
      __builtin_prefetch(next_keys_[group] + i * key_stride_, 0, 2);
    }
  }
  __attribute__((always_inline)) void prefetch_values(int i, int pass) const {
    for (int group = prefetch_begin_ + pass; group < prefetch_end_; group += NUM_PASSES) {
      __builtin_prefetch(next_values_[group] + std::min(i * GROUP, last_line_), 0, 2);
    }
  }

 private:
  //! One KV head in a block of a packed cache.
  const T* block_head(const TokenLocations& tokens, int group, int head) const {
    return (const T*)args_.cache.data + tokens.block[group] * args_.cache.block_stride +
           int64_t(head) * args_.cache.block_size * args_.cache.head_size;
  }
  const uint32_t* key_at(const TokenLocations& tokens, int group, int head) const {
    return (const uint32_t*)block_head(tokens, group, head) + tokens.block_offset[group];
  }
  const uint32_t* value_at(const TokenLocations& tokens, int group, int head) const {
    const T* values = block_head(tokens, group, head) + args_.cache.value_offset;
    return (const uint32_t*)(values + int64_t(tokens.block_offset[group]) * args_.cache.head_size);
  }

  void locate_keys(const TokenLocations& tokens, int head) {
    for (int group = tokens.first / GROUP; group * GROUP < tokens.last; ++group) {
      const uint32_t* from = key_at(tokens, group, head);
      for (int i = 0; i < GROUP; i += LANES) keys_[(group * GROUP + i) / LANES] = from + i;
    }
  }

  void locate_values(const TokenLocations& tokens, int head) {
    for (int group = tokens.first / GROUP; group * GROUP < tokens.last; ++group) {
      const uint32_t* from = value_at(tokens, group, head);
      for (int i = 0; i < GROUP / PAIR<T>; ++i) {
        values_[group * GROUP / PAIR<T> + i] = from + i * args_.cache.head_size;
      }
    }
    if (tokens.first % PAIR<T>) mask_pair(tokens.first - 1, 0xffff0000u, masked_pairs_.data());
    if (tokens.last % PAIR<T>) mask_pair(tokens.last - 1, 0x0000ffffu, masked_pairs_.data() + args_.cache.head_size);
  }

  //! Zeroes one token of a pair: its V may be NaN, which a weight of 0 would not cancel.
  void mask_pair(int i, uint32_t mask, uint32_t* masked) {
    const uint32_t*& pairs = values_[i / PAIR<T>];
    for (int d = 0; d < args_.cache.head_size; ++d) masked[d] = pairs[d] & mask;
    pairs = masked;
  }

  void locate_next(const TokenLocations& next, int head) {
    num_next_ = 0;
    for (int group = next.first / GROUP; group * GROUP < next.last; ++group) {
      next_keys_[num_next_] = key_at(next, group, head);
      next_values_[num_next_++] = value_at(next, group, head);
    }
  }

  const AttentionArgs& args_;
  ChunkPacker<T> packer_;
  const int packed_head_size_;
  const int64_t key_stride_;
  const int last_line_;  //!< where the last cache line of a group's values begins
  const uint32_t* keys_[CHUNK / LANES];
  const uint32_t* values_[CHUNK];
  std::vector<uint32_t> masked_pairs_;  //!< [2][head_size]: the first and the last pair, if only one half is read
  // Of each GROUP that comes next.
  const uint32_t* next_keys_[CHUNK / GROUP];
  const uint32_t* next_values_[CHUNK / GROUP];
  int num_next_ = 0;
  int prefetch_begin_ = 0, prefetch_end_ = 0;  //!< the groups to prefetch now
};

}  // namespace pagedbatch
