// Writes K and V into the slots of a paged cache, and copies whole blocks within and between caches.
//
// Both functions check every index first, and return false, having done nothing, if one is out of range.

#include <cstdint>
#include <cstring>

#include "export.h"
#include "layer_cache.h"

namespace pagedbatch {

//! K and V are [num_tokens, num_kv_heads, head_size] of float, bfloat16 or float16, contiguous in the last dimension.
struct WriteKvArgs {
  const void* key;
  const void* value;
  const int64_t* slots;  // [num_tokens]
  LayerCache cache;
  int64_t num_tokens, key_stride, key_head_stride, value_stride, value_head_stride;  // strides in elements
  int32_t is_bfloat16, is_float16;
};

namespace {

template <class T>
void write_kv(const WriteKvArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    for (int head = 0; head < args.cache.num_kv_heads; ++head) {
      const T* key = (const T*)args.key + token * args.key_stride + head * args.key_head_stride;
      const T* value = (const T*)args.value + token * args.value_stride + head * args.value_head_stride;
      args.cache.write(args.slots[token], head, key, value);
    }
  }
}

}  // namespace
}  // namespace pagedbatch

using namespace pagedbatch;

PAGEDBATCH_EXPORT_SIZE(LayerCache)
PAGEDBATCH_EXPORT_SIZE(WriteKvArgs)

extern "C" bool pagedbatch_write_kv(const WriteKvArgs* args) {
  if (!args->cache.has_slots(args->slots, args->num_tokens)) return false;
  if (args->is_bfloat16) {
    write_kv<BFloat16>(*args);
  } else if (args->is_float16) {
    write_kv<Float16>(*args);
  } else {
    write_kv<float>(*args);
  }
  return true;
}

//! `src_cache` and `dst_cache` are [num_planes][src_blocks or dst_blocks][block_bytes]: a plane is the K or V of one
//! layer, or, in the packed layout, all of them.
extern "C" bool pagedbatch_copy_blocks(const char* src_cache, char* dst_cache, const int64_t* src, const int64_t* dst,
                                       int64_t num_copies, int64_t num_planes, int64_t src_blocks, int64_t dst_blocks,
                                       int64_t block_bytes) {
  if (!all_in_range(src, num_copies, src_blocks) || !all_in_range(dst, num_copies, dst_blocks)) return false;
  for (int64_t plane = 0; plane < num_planes; ++plane) {
    for (int64_t i = 0; i < num_copies; ++i) {
      std::memcpy(dst_cache + (plane * dst_blocks + dst[i]) * block_bytes,
                  src_cache + (plane * src_blocks + src[i]) * block_bytes, block_bytes);
    }
  }
  return true;
}
