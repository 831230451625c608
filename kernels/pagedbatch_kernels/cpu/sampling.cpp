// Draws from rows of scores, and the normalisers of rows of logits. Each row is one thread's, whole.
//
// A row's result depends on nothing but the row: neither on the batch nor on the number of threads.

#include <cmath>

#include "token_probs.h"

namespace pagedbatch {

//! The arguments of `draw`, field by field those of `rows.Draw` in Python. Arrays have an entry a row.
struct Draw {
  const void* scores;  // [num_rows, size], rows `stride` elements apart
  const float* temperatures;  // 0: the likeliest token, the first of equals
  const int64_t* top_k;
  const double* top_p;
  const float* min_p;
  const int64_t* starts;  // [num_rows + 1], each row's stretch of `points` and `token_ids`
  const double* points;
  int64_t* token_ids;
  int64_t num_rows, size, stride;
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

template <class T>
float log_normaliser(const T* logits, int64_t size) {
  constexpr int64_t SPAN = 256;
  const float top = largest_of(logits, size);
  double total = 0;
  for (int64_t span = 0; span < size; span += SPAN) {
    const int64_t end = std::min(size, span + SPAN);
    Vec sums{};
    int64_t i = span;
    for (; i + LANES <= end; i += LANES) sums += exp(load(logits + i) - top);
    if (i < end) {
      const Vec powers = exp(load(logits + i, end - i) - top);
      sums += lane_numbers() < int32_t(end - i) ? powers : Vec{};
    }
    total += sum(sums);
  }
  return top + std::log(total);
}

template <class T>
int64_t first_largest(const T* scores, int64_t size) {
  const float top = largest_of(scores, size);
  int64_t i = 0;
  while (i + LANES <= size && !any(load(scores + i) == top)) i += LANES;
  for (; i < size; ++i) {
    if (to_float(scores[i]) == top) return i;
  }
  return 0;
}

template <class T>
void draw_row(const Draw& draw, int64_t row, Weights& weights) {
  const T* scores = (const T*)draw.scores + row * draw.stride;
  const int64_t begin = draw.starts[row], end = draw.starts[row + 1];
  if (draw.temperatures[row] == 0.0f) {
    std::fill(draw.token_ids + begin, draw.token_ids + end, first_largest(scores, draw.size));
    return;
  }
  weights.take(scores, draw.temperatures[row]);
  const int64_t top_k = draw.top_k[row];
  if (0 < top_k && top_k < draw.size) weights.keep_top_k(top_k);
  if (draw.top_p[row] < 1.0) weights.keep_top_p(draw.top_p[row]);
  if (draw.min_p[row] > 0.0f) weights.keep_min_p(draw.min_p[row]);
  weights.sum_up();
  for (int64_t i = begin; i < end; ++i) draw.token_ids[i] = weights.draw(draw.points[i]);
}

template <class T>
void draw_rows(const Draw& draw) {
#pragma omp parallel num_threads(draw.num_threads) if (draw.num_rows > 1)
  {
    Weights weights(draw.size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t row = 0; row < draw.num_rows; ++row) draw_row<T>(draw, row, weights);
  }
}

template <class T>
void log_normalisers(const T* logits, float* to, int64_t num_rows, int64_t size, int64_t stride, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 1)
  for (int64_t row = 0; row < num_rows; ++row) to[row] = log_normaliser(logits + row * stride, size);
}

}  // namespace
}  // namespace pagedbatch

using pagedbatch::BFloat16;

//! The logsumexp of each row of `logits` [num_rows, size]; NaN where a row holds NaN, +inf, or nothing but -inf.
extern "C" void pagedbatch_log_normalisers(const void* logits, float* to, int64_t num_rows, int64_t size,
                                           int64_t stride, int32_t is_bfloat16, int32_t num_threads) {
  if (is_bfloat16) {
    pagedbatch::log_normalisers((const BFloat16*)logits, to, num_rows, size, stride, num_threads);
  } else {
    pagedbatch::log_normalisers((const float*)logits, to, num_rows, size, stride, num_threads);
  }
}

extern "C" void pagedbatch_draw(const pagedbatch::Draw* draw) {
  if (draw->is_bfloat16) {
    pagedbatch::draw_rows<BFloat16>(*draw);
  } else {
    pagedbatch::draw_rows<float>(*draw);
  }
}
