// Moves K and V: rows into their slots, whole blocks between places. Knows no model.
//
// Both check every index before they write, and return false where one lies outside.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "layer_cache.h"

using pagedbatch::LayerCache;

namespace {

bool all_inside(const int64_t* indices, int64_t count, int64_t size) {
  return std::all_of(indices, indices + count, [size](int64_t index) { return index >= 0 && index < size; });
}

}  // namespace

//! Keys, or values, of tokens: [num_rows, num_kv_heads, head_size] of T, contiguous in the head. Strides in elements.
struct Rows {
  const void* data;
  const int64_t* slots;  // [num_rows]
  int64_t num_rows, row_stride, head_stride;
  int32_t are_values;
};

namespace {

template <class T>
void write(const Rows& rows, const LayerCache& cache) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    for (int head = 0; head < cache.num_kv_heads; ++head) {
      const T* from = (const T*)rows.data + row * rows.row_stride + head * rows.head_stride;
      if (rows.are_values) {
        cache.put_value(rows.slots[row], head, from);
      } else {
        cache.put_key(rows.slots[row], head, from);
      }
    }
  }
}

}  // namespace

//! Rows of 2 or 4 bytes an element into their slots.
extern "C" bool pagedbatch_write_rows(const Rows* rows, const LayerCache* cache, int64_t itemsize) {
  if (!cache->has_slots(rows->slots, rows->num_rows)) return false;
  if (itemsize == 2) {
    write<uint16_t>(*rows, *cache);
  } else {
    write<uint32_t>(*rows, *cache);
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
