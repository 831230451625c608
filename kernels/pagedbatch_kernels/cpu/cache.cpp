// Moves K and V: rows into their slots, whole blocks between places. Copies bytes, knows no type.
//
// Both check every index before they write, and return false where one lies outside.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

bool all_inside(const int64_t* indices, int64_t count, int64_t size) {
  return std::all_of(indices, indices + count, [size](int64_t index) { return index >= 0 && index < size; });
}

}  // namespace

//! Rows of `num_heads` stretches of `head_bytes` into slots of one half of a layer's cache; strides in bytes.
extern "C" bool pagedbatch_write_rows(const char* rows, char* cache, const int64_t* slots, int64_t num_rows,
                                      int64_t num_slots, int64_t num_heads, int64_t head_bytes, int64_t row_stride,
                                      int64_t head_stride) {
  if (!all_inside(slots, num_rows, num_slots)) return false;
  for (int64_t row = 0; row < num_rows; ++row) {
    char* to = cache + slots[row] * num_heads * head_bytes;
    for (int64_t head = 0; head < num_heads; ++head) {
      std::memcpy(to + head * head_bytes, rows + row * row_stride + head * head_stride, head_bytes);
    }
  }
  return true;
}

//! Blocks of `block_bytes`, in every plane (K or V of a layer) of two caches with `src_blocks` and `dst_blocks` each.
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
