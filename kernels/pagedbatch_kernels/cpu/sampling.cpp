// Sampling with temperature, top-k, top-p and min-p, and the logsumexp that turns logits into logprobs.
//
//   sample:    token_ids drawn from softmax(logits / temperature), truncated, by inverting the CDF at given uniforms,
//              and, if asked for, these truncated probabilities
//   logsumexp: float [batch_size] of logits [batch_size, vocab_size]
//
// Logits are float or bfloat16. One thread per position: its result depends neither on its batch nor on the threads.

#include <cmath>

#include "export.h"
#include "token_probs.h"

namespace pagedbatch {

struct SampleArgs {
  const void* logits;         // [batch_size, vocab_size], positions `stride` elements apart
  const float* temperatures;  // [batch_size]; 0: argmax, the first among ties
  const int64_t* top_k;       // [batch_size]; 0 or less, or vocab_size and more: off
  const double* top_p;        // [batch_size]; 1: off
  const float* min_p;         // [batch_size]; 0: off
  const int64_t* starts;      // [batch_size + 1]: position i draws uniforms[starts[i]:starts[i + 1]]
  const double* uniforms;     // in [0, 1)
  int64_t* token_ids;         // one per uniform
  float* probs;               // [batch_size, vocab_size], not normalised; null: not asked for
  int64_t batch_size, vocab_size, stride;
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

template <class T>
float logsumexp(const T* logits, int64_t vocab_size) {
  constexpr int64_t SPAN = 256;
  const float top = max_of(logits, vocab_size);
  double total = 0;
  for (int64_t span = 0; span < vocab_size; span += SPAN) {
    const int64_t end = std::min(vocab_size, span + SPAN);
    Vec sums{};
    int64_t i = span;
    for (; i + LANES <= end; i += LANES) sums += exp(load(logits + i) - top);
    if (i < end) {
      const Vec powers = exp(load(logits + i, end - i) - top);
      sums += lane_indices() < int32_t(end - i) ? powers : Vec{};
    }
    total += reduce_sum(sums);
  }
  return top + std::log(total);
}

template <class T>
int64_t argmax(const T* logits, int64_t vocab_size) {
  const float top = max_of(logits, vocab_size);
  int64_t i = 0;
  while (i + LANES <= vocab_size && !any(load(logits + i) == top)) i += LANES;
  for (; i < vocab_size; ++i) {
    if (to_float(logits[i]) == top) return i;
  }
  return 0;
}

template <class T>
void sample(const SampleArgs& args, int64_t i, TokenProbs& probs) {
  const T* logits = (const T*)args.logits + i * args.stride;
  const int64_t begin = args.starts[i], end = args.starts[i + 1];
  if (args.temperatures[i] == 0.0f) {
    std::fill(args.token_ids + begin, args.token_ids + end, argmax(logits, args.vocab_size));
    return;
  }
  probs.softmax(logits, args.temperatures[i]);
  const int64_t top_k = args.top_k[i];
  if (0 < top_k && top_k < args.vocab_size) probs.top_k(top_k);
  if (args.top_p[i] < 1.0) probs.top_p(args.top_p[i]);
  if (args.min_p[i] > 0.0f) probs.min_p(args.min_p[i]);
  if (args.probs) probs.copy_to(args.probs + i * args.vocab_size);
  probs.build_cdf();
  for (int64_t j = begin; j < end; ++j) args.token_ids[j] = probs.sample(args.uniforms[j]);
}

template <class T>
void sample(const SampleArgs& args) {
#pragma omp parallel num_threads(args.num_threads) if (args.batch_size > 1)
  {
    TokenProbs probs(args.vocab_size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < args.batch_size; ++i) sample<T>(args, i, probs);
  }
}

template <class T>
void logsumexp(const T* logits, float* output, int64_t batch_size, int64_t vocab_size, int64_t stride,
               int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (batch_size > 1)
  for (int64_t i = 0; i < batch_size; ++i) output[i] = logsumexp(logits + i * stride, vocab_size);
}

}  // namespace
}  // namespace pagedbatch

using namespace pagedbatch;

PAGEDBATCH_EXPORT_SIZE(SampleArgs)

//! NaN for a position that holds NaN, +inf, or nothing but -inf.
extern "C" void pagedbatch_logsumexp(const void* logits, float* output, int64_t batch_size, int64_t vocab_size,
                                     int64_t stride, int32_t is_bfloat16, int32_t num_threads) {
  dispatch_dtype(is_bfloat16, [=](auto t) {
    logsumexp((const decltype(t)*)logits, output, batch_size, vocab_size, stride, num_threads);
  });
}

extern "C" void pagedbatch_sample(const SampleArgs* args) {
  dispatch_dtype(args->is_bfloat16, [=](auto t) { sample<decltype(t)>(*args); });
}
