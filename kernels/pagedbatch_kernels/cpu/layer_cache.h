// One layer's paged KV cache: its two layouts, and writing a token's K and V into its slot.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "packed_pairs.h"

namespace pagedbatch {

//! How many tokens ahead of a write its memory is prefetched.
constexpr int PREFETCH_DISTANCE = 4;

inline bool all_in_range(const int64_t* indices, int64_t count, int64_t size) {
  return std::all_of(indices, indices + count, [size](int64_t index) { return index >= 0 && index < size; });
}

//! Slot = block * block_size + offset in the block. Strides are in elements of T.
//!
//! Plain layout, a block's K and its V each: [block_size, num_kv_heads, head_size].
//! Packed layout (packed_pairs.h), for block_size and head_size that are multiples of 16:
//!   K [num_kv_heads, head_size / PAIR, block_size], a packed element holds neighbouring elements of one token;
//!   V [num_kv_heads, block_size / PAIR, head_size], a packed element holds one element of neighbouring tokens.
struct LayerCache {
  void* data;  //!< K of block 0
  int64_t num_blocks;
  int64_t block_stride;  //!< from one block to the next
  int64_t value_offset;  //!< from a block's K to its V
  int32_t block_size, num_kv_heads, head_size;
  int32_t is_packed;

  bool has_slots(const int64_t* slots, int64_t count) const {
    return all_in_range(slots, count, num_blocks * block_size);
  }

  //! Writes one KV head of a token. If V holds NaN or infinity, V is stored as 0 and K as NaN: queries that attend to
  //! the token get NaN by its score; the others, which add its V with weight 0, would otherwise get 0 * NaN = NaN.
  template <class T>
  void write(int64_t slot, int head, const T* key, const T* value) const {
    bool all_finite = true;
    for (int d = 0; d < head_size; ++d) all_finite &= is_finite(value[d]);
    if (all_finite) {
      write_key(slot, head, key);
      write_value(slot, head, value);
    } else {
      write_key(slot, head, std::vector<T>(head_size, QUIET_NAN<T>).data());
      write_value(slot, head, std::vector<T>(head_size).data());
    }
  }

  //! Prefetches the memory of slots[i], unless it is that of slots[i - 1].
  template <class T>
  void prefetch(const int64_t* slots, int64_t i) const {
    if (is_packed && i > 0 && slots[i] == slots[i - 1] + 1 && slots[i] % block_size) return;
    for (int head = 0; head < num_kv_heads; ++head) {
      if (is_packed) {
        const uint32_t* key = packed_key<T>(slots[i], head);
        for (int k = 0; k < head_size / PAIR<T>; ++k) __builtin_prefetch(key + int64_t(k) * block_size, 1, 3);
        const uint32_t* value = packed_value<T>(slots[i], head);
        for (int d = 0; d < head_size; d += CACHE_LINE) __builtin_prefetch(value + d, 1, 3);
      } else {
        const T* key = plain_key<T>(slots[i], head);
        for (int d = 0; d < head_size; d += CACHE_LINE * PAIR<T>) {
          __builtin_prefetch(key + d, 1, 3);
          __builtin_prefetch(key + value_offset + d, 1, 3);
        }
      }
    }
  }

 private:
  template <class T>
  void write_key(int64_t slot, int head, const T* from) const {
    if (!is_packed) {
      std::copy_n(from, head_size, plain_key<T>(slot, head));
      return;
    }
    uint32_t* to = packed_key<T>(slot, head);
    for (int i = 0; i < head_size / PAIR<T>; ++i) {
      std::memcpy(to + int64_t(i) * block_size, from + i * PAIR<T>, sizeof(uint32_t));
    }
  }

  template <class T>
  void write_value(int64_t slot, int head, const T* from) const {
    if (!is_packed) {
      std::copy_n(from, head_size, plain_key<T>(slot, head) + value_offset);
      return;
    }
    // Element by element: another thread may be writing the other half of these packed elements.
    T* to = (T*)packed_value<T>(slot, head) + slot % block_size % PAIR<T>;
    for (int d = 0; d < head_size; ++d) to[d * PAIR<T>] = from[d];
  }

  template <class T>
  T* block(int64_t slot) const {
    return (T*)data + slot / block_size * block_stride;
  }

  template <class T>
  T* plain_key(int64_t slot, int head) const {
    return block<T>(slot) + (slot % block_size * num_kv_heads + head) * head_size;
  }

  template <class T>
  uint32_t* packed_key(int64_t slot, int head) const {
    return (uint32_t*)(block<T>(slot) + int64_t(head) * block_size * head_size) + slot % block_size;
  }

  template <class T>
  uint32_t* packed_value(int64_t slot, int head) const {
    const int64_t offset = head * int64_t(block_size) + slot % block_size / PAIR<T> * PAIR<T>;
    return (uint32_t*)(block<T>(slot) + value_offset + offset * head_size);
  }
};

}  // namespace pagedbatch
