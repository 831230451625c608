// A layer's cache, how it is laid out, and writing into it: a token's keys and values go to its slot, in either layout.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "packed_pairs.h"

namespace pagedbatch {

//! Tokens ahead of the one that is written whose memory is asked for.
constexpr int WRITE_AHEAD = 4;

//! One layer's, and its sizes. A slot is block * block_size + place in it. Strides in elements.
//!
//! A block's keys, and its values as well, are [block_size, num_kv_heads, head_size]. Or packed, in words of 32 bits (see
//! words.h): keys as [num_kv_heads, words of a key, block_size], values as [num_kv_heads, block_size / tokens of a word,
//! head_size]. A word of keys is of one token, a word of values of one element; block_size and head_size are then
//! multiples of 16.
struct LayerCache {
  void* data;  //!< the keys of block 0
  int64_t num_blocks;
  int64_t block_stride;  //!< from one block to the next
  int64_t value_offset;  //!< from a block's keys to its values
  int32_t block_size, num_kv_heads, head_size;
  int32_t is_packed;

  bool has_slots(const int64_t* slots, int64_t count) const {
    const int64_t num_slots = num_blocks * block_size;
    return std::all_of(slots, slots + count, [=](int64_t slot) { return slot >= 0 && slot < num_slots; });
  }

  //! Writes one KV head of a token. A value with NaN or infinity in it reaches whoever sees the token by way of the key,
  //! which becomes NaN, and nobody else: those that do not see it add its value with the weight 0, which would be NaN too.
  template <class T>
  void put(int64_t slot, int head, const T* key, const T* value) const {
    bool all_finite = true;
    for (int d = 0; d < head_size; ++d) all_finite &= is_finite(value[d]);
    if (all_finite) {
      put_key(slot, head, key);
      put_value(slot, head, value);
    } else {
      put_key(slot, head, std::vector<T>(head_size, NOT_A_NUMBER<T>).data());
      put_value(slot, head, std::vector<T>(head_size).data());
    }
  }

  //! Asks for the memory of slots[i], unless it comes with that of the slot before.
  template <class T>
  void fetch(const int64_t* slots, int64_t i) const {
    if (is_packed && i > 0 && slots[i] == slots[i - 1] + 1 && slots[i] % block_size) return;
    for (int head = 0; head < num_kv_heads; ++head) {
      if (is_packed) {
        const uint32_t* key = key_words<T>(slots[i], head);
        for (int word = 0; word < head_size / PER_WORD<T>; ++word) {
          __builtin_prefetch(key + int64_t(word) * block_size, 1, 3);
        }
        const uint32_t* value = value_words<T>(slots[i], head);
        for (int d = 0; d < head_size; d += LINE) __builtin_prefetch(value + d, 1, 3);
      } else {
        const T* key = row<T>(slots[i], head);
        for (int d = 0; d < head_size; d += LINE * PER_WORD<T>) {
          __builtin_prefetch(key + d, 1, 3);
          __builtin_prefetch(key + value_offset + d, 1, 3);
        }
      }
    }
  }

 private:
  static constexpr int LINE = 16;  //!< words of a cache line

  template <class T>
  void put_key(int64_t slot, int head, const T* from) const {
    if (!is_packed) {
      std::copy_n(from, head_size, row<T>(slot, head));
      return;
    }
    uint32_t* to = key_words<T>(slot, head);
    for (int i = 0; i < head_size / PER_WORD<T>; ++i) {
      std::memcpy(to + int64_t(i) * block_size, from + i * PER_WORD<T>, sizeof(uint32_t));
    }
  }

  template <class T>
  void put_value(int64_t slot, int head, const T* from) const {
    if (!is_packed) {
      std::copy_n(from, head_size, row<T>(slot, head) + value_offset);
      return;
    }
    // By the element: another thread may write the other half of these words.
    T* to = (T*)value_words<T>(slot, head) + slot % block_size % PER_WORD<T>;
    for (int d = 0; d < head_size; ++d) to[d * PER_WORD<T>] = from[d];
  }

  template <class T>
  T* block(int64_t slot) const {
    return (T*)data + slot / block_size * block_stride;
  }

  template <class T>
  T* row(int64_t slot, int head) const {
    return block<T>(slot) + (slot % block_size * num_kv_heads + head) * head_size;
  }

  template <class T>
  uint32_t* key_words(int64_t slot, int head) const {
    return (uint32_t*)(block<T>(slot) + int64_t(head) * block_size * head_size) + slot % block_size;
  }

  template <class T>
  uint32_t* value_words(int64_t slot, int head) const {
    const int64_t place = head * int64_t(block_size) + slot % block_size / PER_WORD<T> * PER_WORD<T>;
    return (uint32_t*)(block<T>(slot) + value_offset + place * head_size);
  }
};

}  // namespace pagedbatch
