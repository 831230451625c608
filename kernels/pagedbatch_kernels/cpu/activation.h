// Activations of a feed-forward layer, on a register of floats.

#pragma once

#include "vec.h"

namespace pagedbatch {

//! `gemm.ACTIVATIONS`, in order.
enum Activation { IDENTITY, RELU, SILU, GELU, GELU_TANH, NUM_ACTIVATIONS };

//! x times the sigmoid of y, precise enough to be rounded to T.
template <class T>
Vec gate(Vec x, Vec y) {
  const Vec power = -y < 87.0f ? -y : broadcast(87.0f);  // the largest argument that `exp` takes
  return x / (1.0f + exp<T>(power));
}

//! x times the normal distribution function at x. erfc by 7.1.26 of Abramowitz and Stegun, 1964; off by 1.5e-7.
template <class T>
Vec gelu(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec t = 1.0f / (1.0f + (0.3275911f * 0.70710678f) * size);
  Vec sum = fmadd(broadcast(-1.453152027f), broadcast(1.061405429f), t);
  sum = fmadd(broadcast(1.421413741f), sum, t);
  sum = fmadd(broadcast(-0.284496736f), sum, t);
  sum = fmadd(broadcast(0.254829592f), sum, t);
  const Vec tail = 0.5f * t * sum * exp<T>(-0.5f * x * x);  // of the distribution, beyond |x|
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <int ACTIVATION, class T>
Vec activate(Vec x) {
  if constexpr (ACTIVATION == RELU) return x < 0.0f ? Vec{} : x;  // NaN stays NaN
  if constexpr (ACTIVATION == SILU) return gate<T>(x, x);
  if constexpr (ACTIVATION == GELU) return gelu<T>(x);
  // (1 + tanh(u)) / 2 is the sigmoid of 2 u.
  if constexpr (ACTIVATION == GELU_TANH) return gate<T>(x, 1.5957691f * fmadd(x, 0.044715f * x, x * x));
  return x;
}

}  // namespace pagedbatch
