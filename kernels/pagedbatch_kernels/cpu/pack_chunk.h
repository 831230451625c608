// Packs a chunk of tokens from a cache in the plain layout into the packed one (layer_cache.h).

#pragma once

#include <algorithm>
#include <vector>

#include "packed_pairs.h"
#include "token_locations.h"

namespace pagedbatch {

//! Memory for one packed chunk; none if the cache is packed.
template <class T>
class ChunkPacker {
 public:
  explicit ChunkPacker(const AttentionArgs& args)
      : args_(args),
        width_(round_up(args.cache.head_size, PER_REGISTER)),
        keys_(args.cache.is_packed ? 0 : CHUNK * width_ / PER_REGISTER),
        values_(args.cache.is_packed ? 0 : CHUNK / PAIR<T> * width_ / LANES) {}

  //! Packs one KV head, and prefetches `next`. Sets `keys` to a pointer per LANES tokens, with a stride of CHUNK from
  //! one packed element of a key to the next, and `values` to a pointer per PAIR tokens.
  void pack(const TokenLocations& tokens, int head, const TokenLocations& next, int next_head, const uint32_t** keys,
            const uint32_t** values) {
    pack_keys(tokens, plain(head), next, plain(next_head));
    const int64_t offset = args_.cache.value_offset;
    pack_values(tokens, plain(head) + offset, next, plain(next_head) + offset, values);
    for (int i = 0; i < CHUNK; i += LANES) keys[i / LANES] = (const uint32_t*)keys_.data() + i;
  }

 private:
  static constexpr int PER_REGISTER = LANES * PAIR<T>;

  const T* plain(int head) const { return (const T*)args_.cache.data + head * args_.cache.head_size; }

  //! always_inline: GCC drops calls of a function that only prefetches, as one without effect.
  __attribute__((always_inline)) void prefetch(const TokenLocations& next, int begin, int count, const T* from) const {
    for (int i = std::max(begin, next.first); i < std::min(begin + count, next.last); ++i) {
      for (int d = 0; d < args_.cache.head_size; d += CACHE_LINE * PAIR<T>) {
        __builtin_prefetch(from + next.offset[i] + d, 0, 2);
      }
    }
  }

  void pack_keys(const TokenLocations& tokens, const T* keys, const TokenLocations& next, const T* next_keys) {
    for (int group = 0; group < CHUNK; group += LANES) {
      prefetch(next, group, LANES, next_keys);
      if (group + LANES <= tokens.first || group >= tokens.last) continue;
      const bool all_tokens = group >= tokens.first && group + LANES <= tokens.last;
      for (int d = 0; d < args_.cache.head_size; d += PER_REGISTER) {
        VecU32 packed[LANES];
        if (all_tokens && d + PER_REGISTER <= args_.cache.head_size) {
#pragma GCC unroll 16
          for (int lane = 0; lane < LANES; ++lane) {
            packed[lane] = load_packed(keys + tokens.offset[group + lane] + d, PER_REGISTER);
          }
        } else {
          for (int lane = 0; lane < LANES; ++lane) packed[lane] = load_token(tokens, group + lane, keys, d);
        }
        transpose(packed);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; ++lane) {
          store((uint32_t*)keys_.data() + (d / PAIR<T> + lane) * CHUNK + group, packed[lane]);
        }
      }
    }
  }

  void pack_values(const TokenLocations& tokens, const T* values, const TokenLocations& next, const T* next_values,
                   const uint32_t** pairs) {
    for (int i = 0; i < CHUNK; i += PAIR<T>) {
      prefetch(next, i, PAIR<T>, next_values);
      if (i + PAIR<T> <= tokens.first || i >= tokens.last) continue;
      uint32_t* packed = (uint32_t*)values_.data() + i / PAIR<T> * width_;
      pairs[i / PAIR<T>] = packed;
      if constexpr (PAIR<T> == 2) {
        for (int d = 0; d < args_.cache.head_size; d += PER_REGISTER) {
          store_interleaved(packed + d, load_token(tokens, i, values, d), load_token(tokens, i + 1, values, d));
        }
      } else if (width_ == args_.cache.head_size) {
        pairs[i] = (const uint32_t*)(values + tokens.offset[i]);
      } else {
        for (int d = 0; d < args_.cache.head_size; d += LANES) store(packed + d, load_token(tokens, i, values, d));
      }
    }
  }

  //! A register of token `i` from element `d` on; zeros for a token that may not be read.
  VecU32 load_token(const TokenLocations& tokens, int i, const T* from, int d) const {
    const bool inside = i >= tokens.first && i < tokens.last;
    return inside ? load_packed(from + tokens.offset[i] + d, args_.cache.head_size - d) : VecU32{};
  }

  const AttentionArgs& args_;
  const int width_;             //!< head_size, rounded up to whole registers
  std::vector<VecU32> keys_;    //!< [width / PAIR][CHUNK] packed elements
  std::vector<VecU32> values_;  //!< [CHUNK / PAIR][width] packed elements
};

}  // namespace pagedbatch
