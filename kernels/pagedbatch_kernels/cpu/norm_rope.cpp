// RMS norm, layer norm, and RoPE with the write into the KV cache: what a model computes between its gemms.
//
//   rms_norm:          out[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight,   x [num_tokens, size]
//   layer_norm:        out[t] = (x[t] - mean(x[t])) / sqrt(variance(x[t]) + epsilon) * weight + bias
//   rope_and_write_kv: q, k of qkv [num_tokens, num_heads + 2 * num_kv_heads, head_size] are normed (if the model does)
//                      and rotated; q is replaced in place, k and v go to their slots of the cache
//
// float or bfloat16, contiguous; computed in float and rounded once. One thread per token, sums in an order that
// depends on the size alone: a token's bits do not depend on its batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "export.h"
#include "layer_cache.h"
#include "vec.h"

namespace pagedbatch {
namespace {

//! Elements below which a second thread costs more than it saves.
constexpr int64_t MIN_PARALLEL_WORK = 16384;

//! Calls `body` for each token, on several threads if there is enough to do. GCC keeps the constants of a lambda in
//! registers, and not those of a loop under `omp parallel for`: 13% of an RMS norm in bfloat16.
template <class Body>
void for_each_token(int64_t num_tokens, int64_t size, int num_threads, Body body) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * size > MIN_PARALLEL_WORK)
  for (int64_t token = 0; token < num_tokens; ++token) body(token);
}

//! 1 / sqrt(mean(x^2) + epsilon)
template <class T>
float inverse_rms(const T* x, int64_t size, float epsilon) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += LANES) {
    const Vec values = load(x + i, std::min<int64_t>(LANES, size - i));
    squares += values * values;
  }
  return 1.0f / std::sqrt(reduce_sum(squares) / size + epsilon);
}

template <class T>
void rms_norm(const T* x, const T* weight, T* output, int64_t num_tokens, int64_t size, float epsilon,
              int num_threads) {
  for_each_token(num_tokens, size, num_threads, [=](int64_t token) {
    const T* values = x + token * size;
    const float scale = inverse_rms(values, size, epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
      const int count = std::min<int64_t>(LANES, size - i);
      store(output + token * size + i, load(values + i, count) * scale * load(weight + i, count), count);
    }
  });
}

//! The variance is summed in a second pass over x, around the mean: in one pass, large means would leave little of it.
template <class T>
void layer_norm(const T* x, const T* weight, const T* bias, T* output, int64_t num_tokens, int64_t size, float epsilon,
                int num_threads) {
  for_each_token(num_tokens, size, num_threads, [=](int64_t token) {
    const T* values = x + token * size;
    Vec total{}, squares{};
    for (int64_t i = 0; i < size; i += LANES) total += load(values + i, std::min<int64_t>(LANES, size - i));
    const Vec mean = broadcast(reduce_sum(total) / size);
    for (int64_t i = 0; i < size; i += LANES) {
      const int count = std::min<int64_t>(LANES, size - i);
      const Vec centred = load(values + i, count) - mean;
      squares += lane_indices() < count ? centred * centred : Vec{};
    }
    const float scale = 1.0f / std::sqrt(reduce_sum(squares) / size + epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
      const int count = std::min<int64_t>(LANES, size - i);
      const Vec normed = (load(values + i, count) - mean) * scale * load(weight + i, count);
      store(output + token * size + i, bias ? normed + load(bias + i, count) : normed, count);
    }
  });
}

}  // namespace

struct RopeArgs {
  void* qkv;           // [num_tokens, num_heads + 2 * num_kv_heads, head_size]; k is left as it was
  const void* cos;     // [num_tokens, head_size] of qkv's type, or null: no rotation
  const void* sin;
  const void* q_norm;  // weights of the RMS norm of each head [head_size], or null: no norm
  const void* k_norm;
  const int64_t* slots;  // [num_tokens]
  LayerCache cache;
  int64_t num_tokens;
  int32_t num_heads;
  float epsilon;
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

//! Norm (if `norm`) and rotation (if `cos`) of one head (Su et al., RoFormer, 2021; halves are paired as in
//! transformers).
template <class T>
void apply_rope(const T* from, T* to, const T* norm, const T* cos, const T* sin, int size, float epsilon) {
  const float scale = norm ? inverse_rms(from, size, epsilon) : 1.0f;
  const int half = size / 2;
  for (int d = 0; d < half; d += LANES) {
    const int count = std::min(LANES, half - d);
    Vec first = load(from + d, count), second = load(from + half + d, count);
    if (norm) {
      first = first * scale * load(norm + d, count);
      second = second * scale * load(norm + half + d, count);
    }
    if (cos) {
      const Vec rotated = first * load(cos + d, count) - second * load(sin + d, count);
      second = second * load(cos + half + d, count) + first * load(sin + half + d, count);
      first = rotated;
    }
    store(to + d, first, count);
    store(to + half + d, second, count);
  }
}

template <class T>
void rope_and_write_kv(const RopeArgs& args, int64_t token, T* key) {
  const LayerCache& cache = args.cache;
  const int size = cache.head_size, num_kv_heads = cache.num_kv_heads;
  const int64_t slot = args.slots[token];
  if (token + PREFETCH_DISTANCE < args.num_tokens) cache.prefetch<T>(args.slots, token + PREFETCH_DISTANCE);
  T* head = (T*)args.qkv + token * (args.num_heads + 2 * num_kv_heads) * size;
  const T* cos = args.cos ? (const T*)args.cos + token * size : nullptr;
  const T* sin = args.cos ? (const T*)args.sin + token * size : nullptr;
  for (int i = 0; i < args.num_heads; ++i, head += size) {
    apply_rope(head, head, (const T*)args.q_norm, cos, sin, size, args.epsilon);
  }
  for (int i = 0; i < num_kv_heads; ++i, head += size) {
    apply_rope(head, key, (const T*)args.k_norm, cos, sin, size, args.epsilon);
    cache.write(slot, i, key, head + num_kv_heads * size);
  }
}

template <class T>
void rope_and_write_kv(const RopeArgs& args) {
  const int width = (args.num_heads + 2 * args.cache.num_kv_heads) * args.cache.head_size;
#pragma omp parallel num_threads(args.num_threads) if (args.num_tokens * width > MIN_PARALLEL_WORK)
  {
    std::vector<T> key(args.cache.head_size);
#pragma omp for
    for (int64_t token = 0; token < args.num_tokens; ++token) {
      rope_and_write_kv(args, token, key.data());
    }
  }
}

}  // namespace
}  // namespace pagedbatch

using namespace pagedbatch;

PAGEDBATCH_EXPORT_SIZE(RopeArgs)

//! `x` and `output` [num_tokens, size], `weight` [size].
extern "C" void pagedbatch_rms_norm(const void* x, const void* weight, void* output, int64_t num_tokens, int64_t size,
                                    float epsilon, int32_t is_bfloat16, int32_t num_threads) {
  dispatch_dtype(is_bfloat16, [=](auto t) {
    using T = decltype(t);
    rms_norm((const T*)x, (const T*)weight, (T*)output, num_tokens, size, epsilon, num_threads);
  });
}

//! As `rms_norm`; `bias` [size], or null.
extern "C" void pagedbatch_layer_norm(const void* x, const void* weight, const void* bias, void* output,
                                      int64_t num_tokens, int64_t size, float epsilon, int32_t is_bfloat16,
                                      int32_t num_threads) {
  dispatch_dtype(is_bfloat16, [=](auto t) {
    using T = decltype(t);
    layer_norm((const T*)x, (const T*)weight, (const T*)bias, (T*)output, num_tokens, size, epsilon, num_threads);
  });
}

//! Returns false, having done nothing, if a slot is outside the cache.
extern "C" bool pagedbatch_rope_and_write_kv(const RopeArgs* args) {
  if (!args->cache.has_slots(args->slots, args->num_tokens)) return false;
  dispatch_dtype(args->is_bfloat16, [=](auto t) { rope_and_write_kv<decltype(t)>(*args); });
  return true;
}
