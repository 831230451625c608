// What stands between a decoder's matrix products: norms and rotations. Each row is one token's.
//
// Computed in float32 and rounded once. Sums are taken in an order that depends on the row's size alone, and every row by
// one thread: a token's result is the same bits whatever it is batched with.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "layer_cache.h"
#include "vec.h"

namespace pagedbatch {
namespace {

//! Elements below which a second thread costs more than it brings.
constexpr int64_t ALONE = 16384;

//! Calls `body` for each row, with threads where there is enough to do.
template <class Body>
void each_row(int64_t num_rows, int64_t width, int num_threads, Body body) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > ALONE)
  for (int64_t row = 0; row < num_rows; ++row) body(row);
}

//! What is multiplied into a row to make its mean square 1.
template <class T>
float inverse_rms(const T* row, int64_t size, float epsilon) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += LANES) {
    const Vec values = load(row + i, std::min<int64_t>(LANES, size - i));
    squares += values * values;
  }
  return 1.0f / std::sqrt(sum(squares) / size + epsilon);
}

template <class T>
void rms_norm(const T* from, const T* weight, T* to, int64_t num_rows, int64_t size, float epsilon, int num_threads) {
  each_row(num_rows, size, num_threads, [=](int64_t row) {
    const T* values = from + row * size;
    const float scale = inverse_rms(values, size, epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
      const int count = std::min<int64_t>(LANES, size - i);
      store(to + row * size + i, load(values + i, count) * scale * load(weight + i, count), count);
    }
  });
}

}  // namespace

//! The arguments of `rotate_and_store`, field by field those of `layers.Rotation` in Python.
struct Rotation {
  void* qkv;          // [num_tokens, num_heads + 2 * num_kv_heads, head_size], contiguous
  const void* cosine;  // [num_tokens, head_size] of qkv's type, or null: no rotation
  const void* sine;
  const void* query_norm;  // [head_size], or null: no norm
  const void* key_norm;
  const int64_t* slots;  // [num_tokens]
  LayerCache cache;
  int64_t num_tokens;
  int32_t num_heads;
  float epsilon;
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

//! One head's norm and rotation (Su et al., RoFormer, 2021; halves paired as in transformers), from and to where it is.
template <class T>
void turn(const T* from, T* to, const T* norm, const T* cosine, const T* sine, int size, float epsilon) {
  const float scale = norm ? inverse_rms(from, size, epsilon) : 1.0f;
  const int half = size / 2;
  for (int d = 0; d < half; d += LANES) {
    const int count = std::min(LANES, half - d);
    Vec first = load(from + d, count), second = load(from + half + d, count);
    if (norm) {
      first = first * scale * load(norm + d, count);
      second = second * scale * load(norm + half + d, count);
    }
    if (cosine) {
      const Vec turned = first * load(cosine + d, count) - second * load(sine + d, count);
      second = second * load(cosine + half + d, count) + first * load(sine + half + d, count);
      first = turned;
    }
    store(to + d, first, count);
    store(to + half + d, second, count);
  }
}

//! A token's queries where they stand, its keys and values into its slot.
template <class T>
void rotate_and_store(const Rotation& step, int64_t token, T* key) {
  const LayerCache& cache = step.cache;
  const int size = cache.head_size, keys = cache.num_kv_heads;
  const int64_t slot = step.slots[token];
  if (token + WRITE_AHEAD < step.num_tokens) cache.fetch<T>(step.slots, token + WRITE_AHEAD);
  T* row = (T*)step.qkv + token * (step.num_heads + 2 * keys) * size;
  const T* cosine = step.cosine ? (const T*)step.cosine + token * size : nullptr;
  const T* sine = step.cosine ? (const T*)step.sine + token * size : nullptr;
  for (int head = 0; head < step.num_heads; ++head, row += size) {
    turn(row, row, (const T*)step.query_norm, cosine, sine, size, step.epsilon);
  }
  for (int head = 0; head < keys; ++head, row += size) {
    turn(row, key, (const T*)step.key_norm, cosine, sine, size, step.epsilon);
    cache.put(slot, head, key, row + keys * size);
  }
}

template <class T>
void rotate_and_store(const Rotation& step) {
  const int width = (step.num_heads + 2 * step.cache.num_kv_heads) * step.cache.head_size;
#pragma omp parallel num_threads(step.num_threads) if (step.num_tokens * width > ALONE)
  {
    std::vector<T> key(step.cache.head_size);
#pragma omp for
    for (int64_t token = 0; token < step.num_tokens; ++token) {
      rotate_and_store(step, token, key.data());
    }
  }
}

}  // namespace
}  // namespace pagedbatch

using pagedbatch::BFloat16;

//! `from` and `to` [num_rows, size], `weight` [size].
extern "C" void pagedbatch_rms_norm(const void* from, const void* weight, void* to, int64_t num_rows, int64_t size,
                                    float epsilon, int32_t is_bfloat16, int32_t num_threads) {
  if (is_bfloat16) {
    pagedbatch::rms_norm((const BFloat16*)from, (const BFloat16*)weight, (BFloat16*)to, num_rows, size, epsilon,
                         num_threads);
  } else {
    pagedbatch::rms_norm((const float*)from, (const float*)weight, (float*)to, num_rows, size, epsilon, num_threads);
  }
}

//! Queries are turned where they stand, keys and values go to their slots. False, and nothing done, for a slot outside.
extern "C" bool pagedbatch_rotate_and_store(const pagedbatch::Rotation* step) {
  if (!step->cache.has_slots(step->slots, step->num_tokens)) return false;
  if (step->is_bfloat16) {
    pagedbatch::rotate_and_store<BFloat16>(*step);
  } else {
    pagedbatch::rotate_and_store<float>(*step);
  }
  return true;
}
