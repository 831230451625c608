// Products of rows and a matrix that was laid out for them once. Each row is one token's.
//
// The matrix lies in panels of WIDTH columns, word by word of them (see words.h), so that a tile of ROWS rows by a panel
// is summed in registers (Goto and van de Geijn, 2008). An element is one sum over its row, in order, in one lane: a
// token's result is the same bits whatever it is batched with, and however many threads there are.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "packed_pairs.h"

namespace pagedbatch {
namespace {

constexpr int WIDTH = PANEL * LANES;
//! Columns of a panel of two matrices: as many of the first, and then as many of the second.
constexpr int HALF = WIDTH / 2;
//! Tiles that a panel is used for before the next one, and words of both taken at once: what this makes of rows, panel
//! and sums stays in the cache of a core.
constexpr int TILES = 16, WORDS = 1024;
//! Words that a cache line has.
constexpr int LINE = 16;

int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

}  // namespace

//! The arguments of `multiply`, field by field those of `products.Product` in Python. T is bfloat16 or float.
struct Product {
  const void* rows;      // [num_rows, size] of T, contiguous; whole words, so an even size for bfloat16
  const void* panels;    // [panels][size in words][WIDTH] words
  const float* bias;     // [panels][WIDTH], or null
  const void* residual;  // [num_rows, width] of T, contiguous, or null
  void* result;          // [num_rows, width] of T, contiguous
  const void* next;      // panels of the matrix that is multiplied with after this one, to be fetched, or null
  int64_t num_rows, size, width;
  int64_t next_words, next_panels;  // of its rows, and in all
  int32_t is_gated;  // panels of two matrices: the result is SiLU of the first one's product, times the second one's
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

//! Good for what is then rounded to T.
template <class T>
Vec silu(Vec values) {
  const Vec power = -values < 87.0f ? -values : broadcast(87.0f);  // e^87 is the largest that `exp` is good for
  return values / (1.0f + exp<T>(power));
}

//! One thread's part of a product.
template <class T>
class Multiplier {
 public:
  explicit Multiplier(const Product& product)
      : product_(product),
        num_words_(product.size / PER_WORD<T>),
        outputs_(product.is_gated ? HALF : WIDTH),
        num_panels_(parts(product.width, outputs_)),
        num_tiles_(parts(product.num_rows, ROWS)),
        sums_((num_words_ > WORDS ? TILES : 1) * ROWS * PANEL) {}

  //! A thread's share of the jobs, each of which is one tile and one panel: by TILES tiles, then panel, then tile.
  void run(int part) {
    int64_t begin = num_jobs() * part / product_.num_threads;
    const int64_t end = num_jobs() * (part + 1) / product_.num_threads;
    const int64_t next_panel = product_.next_panels * part / product_.num_threads;
    const uint32_t* next = (const uint32_t*)product_.next + next_panel * product_.next_words * WIDTH;
    while (begin < end) {
      const int64_t first_tile = begin / (num_panels_ * TILES) * TILES;
      const int64_t num_tiles = std::min<int64_t>(TILES, num_tiles_ - first_tile);
      const int64_t job = begin - first_tile * num_panels_;
      const int64_t tile = job % num_tiles, count = std::min(num_tiles - tile, end - begin);
      begin += count;
      const int64_t panel = job / num_tiles;
      const bool has_next = begin == end && product_.next;
      multiply(first_tile + tile, count, panel, has_next ? next : panels(panel + 1));
    }
  }

 private:
  int64_t num_jobs() const { return num_panels_ * num_tiles_; }

  const uint32_t* panels(int64_t panel) const {
    return (const uint32_t*)product_.panels + panel * num_words_ * WIDTH;
  }

  //! `count` tiles and one panel; `next` is the one after it.
  void multiply(int64_t first_tile, int64_t count, int64_t panel, const uint32_t* next) {
    for (int64_t word = 0; word < num_words_; word += WORDS) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (first_tile + i) * ROWS;
        with_constant<ROWS>(std::min<int64_t>(ROWS, product_.num_rows - row),
                            [&](auto n) { multiply<n>(row, panel, next, word, i); });
      }
    }
  }

  //! N rows and a panel's columns, their words from `word` on: those of the `i`-th tile in turn.
  template <int N>
  void multiply(int64_t row, int64_t panel, const uint32_t* next, int64_t word, int64_t i) {
    const int64_t num_words = std::min<int64_t>(WORDS, num_words_ - word);
    const uint32_t* rows = (const uint32_t*)product_.rows + row * num_words_ + word;
    const uint32_t* columns = panels(panel) + word * WIDTH;
    const bool is_last = word + num_words == num_words_;
    // What comes after these words is on its way from memory meanwhile, a part with each of the first tiles.
    const uint32_t* ahead = (is_last ? next : columns + num_words * WIDTH) + i * num_words * LINE;
    if (is_last) {
      for (int n = 0; n < N; ++n) fetch(row + n, panel);
    }
    // In memory between one part of the words and the next, and for `finish`.
    float* const left = (float*)(sums_.data() + (num_words_ > WORDS ? i * ROWS * PANEL : 0));
    const int64_t row_size = num_words_;
    Vec sums[N][PANEL] = {};
    if (word > 0) {
      for (int n = 0; n < N; ++n) {
        for (int m = 0; m < PANEL; ++m) sums[n][m] = load(left + (n * PANEL + m) * LANES);
      }
    }
    int64_t w = 0;
    do {  // no `for`: see tile.h
      Words column[PANEL];
#pragma GCC unroll 4
      for (int m = 0; m < PANEL; ++m) column[m] = load(columns + w * WIDTH + m * LANES);
      __builtin_prefetch(ahead + w * LINE, 0, 2);
      add_products<T>(sums, column, [&](int n) { return rows[n * row_size + w]; });
    } while (++w < num_words);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < PANEL; ++m) store(left + (n * PANEL + m) * LANES, sums[n][m]);
    }
    if (is_last) product_.is_gated ? finish<HALF>(row, N, panel, left) : finish<WIDTH>(row, N, panel, left);
  }

  //! Asks for the memory that `finish` needs: to wait for it there would cost a tenth of the time.
  void fetch(int64_t row, int64_t panel) const {
    const int64_t at = row * product_.width + panel * outputs_;
    for (int i = 0; i < outputs_; i += LINE * PER_WORD<T>) {
      __builtin_prefetch((const T*)product_.result + at + i, 1, 3);
      if (product_.residual) __builtin_prefetch((const T*)product_.residual + at + i, 0, 3);
    }
  }

  //! Turns the sums of rows and a panel into its OUTPUTS results of each: HALF if it is one of two matrices.
  template <int OUTPUTS>
  __attribute__((noinline)) void finish(int64_t row, int num_rows, int64_t panel, const float* sums) const {
    const int64_t width = product_.width, at = row * width + panel * OUTPUTS;
    const int count = std::min<int64_t>(OUTPUTS, width - panel * OUTPUTS);
    const float* bias = product_.bias ? product_.bias + panel * WIDTH : nullptr;
    const T* residual = product_.residual ? (const T*)product_.residual + at : nullptr;
    T* result = (T*)product_.result + at;
    for (int n = 0; n < num_rows; ++n, sums += WIDTH, result += width) {
      if (count == OUTPUTS) {  // a constant: straight code
        finish_row<OUTPUTS>(sums, bias, residual, result, OUTPUTS);
      } else {
        finish_row<OUTPUTS>(sums, bias, residual, result, count);
      }
      if (residual) residual += width;
    }
  }

  template <int OUTPUTS>
  __attribute__((always_inline)) static void finish_row(const float* sums, const float* bias, const T* residual,
                                                        T* result, int count) {
#pragma GCC unroll 4
    for (int i = 0; i < count; i += LANES * PER_WORD<T>) {
      Vec values[PER_WORD<T>];
#pragma GCC unroll 2
      for (int part = 0; part < PER_WORD<T>; ++part) {
        const int from = i + part * LANES;
        Vec value = load(sums + from);
        if (bias) value += load(bias + from);
        if constexpr (OUTPUTS == HALF) {
          Vec other = load(sums + HALF + from);
          if (bias) other += load(bias + HALF + from);
          value = silu<T>(value) * other;
        }
        if (residual) value += load(residual + from, count - from);
        values[part] = value;
      }
      store_words(result + i, rounded(values), count - i);
    }
  }

  const Product& product_;
  const int64_t num_words_;  //!< of a row
  const int outputs_;        //!< elements of the result a panel gives
  const int64_t num_panels_, num_tiles_;
  std::vector<Vec> sums_;  //!< [TILES * ROWS][PANEL], between one part of the words and the next, if there is a next
};

template <class T>
void multiply(const Product& product) {
#pragma omp parallel num_threads(product.num_threads)
  {
    Multiplier<T> multiplier(product);
#pragma omp for schedule(static, 1)
    for (int part = 0; part < product.num_threads; ++part) {
      multiplier.run(part);
    }
  }
}

//! Puts rows of `size` values into their columns: `count` of them from column `first` on, or, where they are one of two
//! matrices, HALF of them in each panel, the first in column `first`.
template <class T>
void lay_out(const T* from, int64_t count, int64_t size, uint32_t* panels, int64_t first, bool is_gated) {
  const int64_t num_words = size / PER_WORD<T>;
#pragma omp parallel for
  for (int64_t begin = 0; begin < count; begin += WIDTH) {
    const int64_t end = std::min(begin + WIDTH, count);
    for (int64_t word = 0; word < num_words; word += LINE) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t column = first + (is_gated ? i / HALF * WIDTH + i % HALF : i);
        const uint32_t* words = (const uint32_t*)(from + i * size);
        uint32_t* to = panels + column / WIDTH * num_words * WIDTH + column % WIDTH;
        for (int64_t w = word; w < std::min(word + LINE, num_words); ++w) to[w * WIDTH] = words[w];
      }
    }
  }
}

}  // namespace
}  // namespace pagedbatch

using pagedbatch::BFloat16;

extern "C" int32_t pagedbatch_panel_width() { return pagedbatch::WIDTH; }

//! Whether the CPU multiplies matrices of bfloat16 as such, several times faster than rows: another library's work.
extern "C" bool pagedbatch_has_matrix_unit() {
#if defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16)
  return true;
#else
  return false;
#endif
}

//! `rows` [count, size] of T, contiguous, into `panels`; see `lay_out`.
extern "C" void pagedbatch_lay_out(const void* rows, int64_t count, int64_t size, void* panels, int64_t first,
                                   int32_t is_gated, int32_t is_bfloat16) {
  if (is_bfloat16) {
    pagedbatch::lay_out((const BFloat16*)rows, count, size, (uint32_t*)panels, first, is_gated);
  } else {
    pagedbatch::lay_out((const float*)rows, count, size, (uint32_t*)panels, first, is_gated);
  }
}

extern "C" void pagedbatch_multiply(const pagedbatch::Product* product) {
  if (product->is_bfloat16) {
    pagedbatch::multiply<BFloat16>(*product);
  } else {
    pagedbatch::multiply<float>(*product);
  }
}
