// C = f(A * B^T + bias) + residual, or gated, C = f(A * B0^T + bias0) * (A * B1^T + bias1) + residual, for an activation f.
//
// A is [m, k], B [n, k], C [m, n], all of T (float or bfloat16), contiguous; sums are float, rounded once to T. B is
// packed beforehand by `pack`: panels of PANEL_WIDTH columns, [panel][packed element of k][PANEL_WIDTH]
// (packed_pairs.h), so that a micro-kernel of TILE_ROWS rows by one panel accumulates in registers (Goto and van de
// Geijn, 2008).
//
// Each element of C is one sum over k, in order, in one lane: a row's bits do not depend on m or on the number of
// threads.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "activation.h"
#include "export.h"
#include "packed_pairs.h"

namespace pagedbatch {
namespace {

constexpr int PANEL_WIDTH = TILE_VECS * LANES;
//! A gated panel has HALF_PANEL columns of the gate matrix, then the same columns of the up matrix.
constexpr int HALF_PANEL = PANEL_WIDTH / 2;
//! Cache blocking: a panel serves M_BLOCK tiles before the next one, K_BLOCK packed elements at a time, so that the
//! rows, the panel and the accumulators of a block stay in the core's cache.
constexpr int M_BLOCK = 16, K_BLOCK = 1024;

int64_t ceil_div(int64_t size, int64_t part) { return (size + part - 1) / part; }

}  // namespace

struct GemmArgs {
  const void* input;        // A: [m, k]; k is even for bfloat16
  const void* weight;       // B, packed: [num_panels][k / PAIR][PANEL_WIDTH] packed elements
  const float* bias;        // [num_panels][PANEL_WIDTH], or null
  const void* residual;     // [m, n] of T, or null
  void* output;             // C: [m, n]
  const void* next_weight;  // the packed B of the next call, to be prefetched, or null
  int64_t m, k, n;
  int64_t next_k, next_num_panels;  // of `next_weight`: packed elements per row, and its panels
  int32_t is_gated;
  int32_t activation;
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

//! One thread's share of a product.
template <class T>
class GemmThread {
 public:
  explicit GemmThread(const GemmArgs& args)
      : args_(args),
        packed_k_(args.k / PAIR<T>),
        panel_outputs_(args.is_gated ? HALF_PANEL : PANEL_WIDTH),
        num_panels_(ceil_div(args.n, panel_outputs_)),
        num_tiles_(ceil_div(args.m, TILE_ROWS)),
        acc_((packed_k_ > K_BLOCK ? M_BLOCK : 1) * TILE_ROWS * TILE_VECS) {}

  //! Work is counted in pairs of a tile and a panel, ordered by block of M_BLOCK tiles, then panel, then tile.
  void run(int thread) {
    int64_t begin = num_pairs() * thread / args_.num_threads;
    const int64_t end = num_pairs() * (thread + 1) / args_.num_threads;
    const int64_t next_panel = args_.next_num_panels * thread / args_.num_threads;
    const uint32_t* next = (const uint32_t*)args_.next_weight + next_panel * args_.next_k * PANEL_WIDTH;
    while (begin < end) {
      const int64_t first_tile = begin / (num_panels_ * M_BLOCK) * M_BLOCK;
      const int64_t num_tiles = std::min<int64_t>(M_BLOCK, num_tiles_ - first_tile);
      const int64_t offset = begin - first_tile * num_panels_;
      const int64_t tile = offset % num_tiles, count = std::min(num_tiles - tile, end - begin);
      begin += count;
      const int64_t panel = offset / num_tiles;
      const bool has_next = begin == end && args_.next_weight;
      compute_block(first_tile + tile, count, panel, has_next ? next : weight(panel + 1));
    }
  }

 private:
  int64_t num_pairs() const { return num_panels_ * num_tiles_; }

  const uint32_t* weight(int64_t panel) const {
    return (const uint32_t*)args_.weight + panel * packed_k_ * PANEL_WIDTH;
  }

  //! `count` tiles by one panel; `next` is the panel to prefetch.
  void compute_block(int64_t first_tile, int64_t count, int64_t panel, const uint32_t* next) {
    for (int64_t k = 0; k < packed_k_; k += K_BLOCK) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (first_tile + i) * TILE_ROWS;
        dispatch_const<TILE_ROWS>(std::min<int64_t>(TILE_ROWS, args_.m - row),
                                  [&](auto n) { compute_tile<n>(row, panel, next, k, i); });
      }
    }
  }

  //! The micro-kernel: N rows by one panel, for K_BLOCK packed elements from `k` on. `i` numbers the tiles of a block.
  template <int N>
  void compute_tile(int64_t row, int64_t panel, const uint32_t* next, int64_t k, int64_t i) {
    const int64_t k_size = std::min<int64_t>(K_BLOCK, packed_k_ - k);
    const uint32_t* a = (const uint32_t*)args_.input + row * packed_k_ + k;
    const uint32_t* b = weight(panel) + k * PANEL_WIDTH;
    const bool is_last = k + k_size == packed_k_;
    // The first tiles of a block each prefetch a part of what the next block reads.
    const uint32_t* prefetch = (is_last ? next : b + k_size * PANEL_WIDTH) + i * k_size * CACHE_LINE;
    if (is_last) {
      for (int n = 0; n < N; ++n) prefetch_output(row + n, panel);
    }
    // Accumulators are kept here between two blocks of k, and for the epilogue.
    float* const partial = (float*)(acc_.data() + (packed_k_ > K_BLOCK ? i * TILE_ROWS * TILE_VECS : 0));
    const int64_t row_stride = packed_k_;
    Vec acc[N][TILE_VECS] = {};
    if (k > 0) {
      for (int n = 0; n < N; ++n) {
        for (int m = 0; m < TILE_VECS; ++m) acc[n][m] = load(partial + (n * TILE_VECS + m) * LANES);
      }
    }
    int64_t j = 0;
    do {  // not `for`: see attention_tile.h
      VecU32 columns[TILE_VECS];
#pragma GCC unroll 4
      for (int m = 0; m < TILE_VECS; ++m) columns[m] = load(b + j * PANEL_WIDTH + m * LANES);
      __builtin_prefetch(prefetch + j * CACHE_LINE, 0, 2);
      fma_tile<T>(acc, columns, [&](int n) { return a[n * row_stride + j]; });
    } while (++j < k_size);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < TILE_VECS; ++m) store(partial + (n * TILE_VECS + m) * LANES, acc[n][m]);
    }
    if (is_last) {
      dispatch_const<NUM_ACTIVATIONS>(args_.activation + 1, [&](auto next) {
        constexpr int ACTIVATION = next - 1;
        args_.is_gated ? epilogue<HALF_PANEL, ACTIVATION>(row, N, panel, partial)
                       : epilogue<PANEL_WIDTH, ACTIVATION>(row, N, panel, partial);
      });
    }
  }

  //! Prefetches what the epilogue reads and writes: waiting for it there would cost a tenth of the time.
  void prefetch_output(int64_t row, int64_t panel) const {
    const int64_t at = row * args_.n + panel * panel_outputs_;
    for (int i = 0; i < panel_outputs_; i += CACHE_LINE * PAIR<T>) {
      __builtin_prefetch((const T*)args_.output + at + i, 1, 3);
      if (args_.residual) __builtin_prefetch((const T*)args_.residual + at + i, 0, 3);
    }
  }

  //! Writes OUTPUTS columns of C from the accumulators: HALF_PANEL if gated, else PANEL_WIDTH.
  template <int OUTPUTS, int ACTIVATION>
  __attribute__((noinline)) void epilogue(int64_t row, int num_rows, int64_t panel, const float* acc) const {
    const int64_t stride = args_.n, at = row * stride + panel * OUTPUTS;
    const int count = std::min<int64_t>(OUTPUTS, stride - panel * OUTPUTS);
    const float* bias = args_.bias ? args_.bias + panel * PANEL_WIDTH : nullptr;
    const T* residual = args_.residual ? (const T*)args_.residual + at : nullptr;
    T* output = (T*)args_.output + at;
    for (int n = 0; n < num_rows; ++n, acc += PANEL_WIDTH, output += stride) {
      if (count == OUTPUTS) {  // a constant, so that the loop unrolls
        epilogue_row<OUTPUTS, ACTIVATION>(acc, bias, residual, output, OUTPUTS);
      } else {
        epilogue_row<OUTPUTS, ACTIVATION>(acc, bias, residual, output, count);
      }
      if (residual) residual += stride;
    }
  }

  template <int OUTPUTS, int ACTIVATION>
  __attribute__((always_inline)) static void epilogue_row(const float* acc, const float* bias, const T* residual,
                                                          T* output, int count) {
#pragma GCC unroll 4
    for (int i = 0; i < count; i += LANES * PAIR<T>) {
      Vec values[PAIR<T>];
#pragma GCC unroll 2
      for (int part = 0; part < PAIR<T>; ++part) {
        const int at = i + part * LANES;
        Vec value = load(acc + at);
        if (bias) value += load(bias + at);
        value = activate<ACTIVATION, T>(value);
        if constexpr (OUTPUTS == HALF_PANEL) {
          Vec up = load(acc + HALF_PANEL + at);
          if (bias) up += load(bias + HALF_PANEL + at);
          value *= up;
        }
        if (residual) value += load(residual + at, count - at);
        values[part] = value;
      }
      store_packed(output + i, to_packed(values), count - i);
    }
  }

  const GemmArgs& args_;
  const int64_t packed_k_;   //!< packed elements per row of A
  const int panel_outputs_;  //!< columns of C per panel
  const int64_t num_panels_, num_tiles_;
  std::vector<Vec> acc_;  //!< [M_BLOCK or 1][TILE_ROWS][TILE_VECS]
};

template <class T>
void gemm(const GemmArgs& args) {
#pragma omp parallel num_threads(args.num_threads)
  {
    GemmThread<T> share(args);
#pragma omp for schedule(static, 1)
    for (int thread = 0; thread < args.num_threads; ++thread) share.run(thread);
  }
}

//! Copies `count` rows of a weight matrix [count, k] into the columns of `panels` from `first` on. If gated, `first`
//! is 0 for the gate matrix and HALF_PANEL for the up matrix, and each panel takes HALF_PANEL rows.
template <class T>
void pack(const T* weight, int64_t count, int64_t k, uint32_t* panels, int64_t first, bool is_gated) {
  const int64_t packed_k = k / PAIR<T>;
#pragma omp parallel for
  for (int64_t begin = 0; begin < count; begin += PANEL_WIDTH) {
    const int64_t end = std::min(begin + PANEL_WIDTH, count);
    for (int64_t line = 0; line < packed_k; line += CACHE_LINE) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t column = first + (is_gated ? i / HALF_PANEL * PANEL_WIDTH + i % HALF_PANEL : i);
        const uint32_t* from = (const uint32_t*)(weight + i * k);
        uint32_t* to = panels + column / PANEL_WIDTH * packed_k * PANEL_WIDTH + column % PANEL_WIDTH;
        for (int64_t j = line; j < std::min(line + CACHE_LINE, packed_k); ++j) to[j * PANEL_WIDTH] = from[j];
      }
    }
  }
}

}  // namespace
}  // namespace pagedbatch

using namespace pagedbatch;

PAGEDBATCH_EXPORT_SIZE(GemmArgs)

extern "C" int32_t pagedbatch_panel_width() { return PANEL_WIDTH; }

//! Whether the CPU has matrix instructions for bfloat16, which oneDNN uses and this file does not.
extern "C" bool pagedbatch_has_matrix_unit() {
#if defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16)
  return true;
#else
  return false;
#endif
}

//! See `pack`.
extern "C" void pagedbatch_pack(const void* weight, int64_t count, int64_t k, void* panels, int64_t first,
                                int32_t is_gated, int32_t is_bfloat16) {
  dispatch_dtype(is_bfloat16, [=](auto t) {
    pack((const decltype(t)*)weight, count, k, (uint32_t*)panels, first, is_gated);
  });
}

extern "C" void pagedbatch_gemm(const GemmArgs* args) {
  dispatch_dtype(args->is_bfloat16, [=](auto t) { gemm<decltype(t)>(*args); });
}
