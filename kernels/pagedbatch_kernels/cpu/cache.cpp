// Moves K and V: rows into their slots, whole blocks between places. Knows no model.
//
// Both check every index before they write, and return false where one lies outside.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "layer_cache.h"

using pagedbatch::BFloat16;
using pagedbatch::Float16;
using pagedbatch::LayerCache;

namespace {

bool all_inside(const int64_t* indices, int64_t count, int64_t size) {
  return std::all_of(indices, indices + count, [size](int64_t index) { return index >= 0 && index < size; });
}

}  // namespace

//! Keys and values of tokens: each [num_rows, num_kv_heads, head_size] of T, contiguous in the head. Strides in elements.
struct Rows {
  const void* keys;
  const void* values;
  const int64_t* slots;  // [num_rows]
  int64_t num_rows, key_stride, key_head_stride, value_stride, value_head_stride;
};

namespace {

template <class T>
void write(const Rows& rows, const LayerCache& cache) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    for (int head = 0; head < cache.num_kv_heads; ++head) {
      cache.put(rows.slots[row], head, (const T*)rows.keys + row * rows.key_stride + head * rows.key_head_stride,
                (const T*)rows.values + row * rows.value_stride + head * rows.value_head_stride);
    }
  }
}

}  // namespace

//! Rows into their slots, of bfloat16, of float16 or of float.
extern "C" bool pagedbatch_write_rows(const Rows* rows, const LayerCache* cache, int32_t is_bfloat16, int32_t is_float16) {
  if (!cache->has_slots(rows->slots, rows->num_rows)) return false;
  if (is_bfloat16) {
    write<BFloat16>(*rows, *cache);
  } else if (is_float16) {
    write<Float16>(*rows, *cache);
  } else {
    write<float>(*rows, *cache);
  }
  return true;
}

//! Blocks of `block_bytes`, in every plane of two caches with `src_blocks` and `dst_blocks` each: K or V of a layer, or, in
//! packed ones, all of them.
extern "C" bool pagedbatch_copy_blocks(const char* src_cache, char* dst_cache, const int64_t* src, const int64_t* dst,
                                       int64_t num_copies, int64_t num_planes, int64_t src_blocks, int64_t dst_blocks,
                                       int64_t block_bytes) {
  if (!all_inside(src, num_copies, src_blocks) || !all_inside(dst, num_copies, dst_blocks)) return false;
  for (int64_t plane = 0; plane < num_planes; ++plane) {
    for (int64_t i = 0; i < num_copies; ++i) {
      std::memcpy(dst_cache + (plane * dst_blocks + dst[i]) * block_bytes,
                  src_cache + (plane * src_blocks + src[i]) * block_bytes, block_bytes);
    }
  }
  return true;
}
