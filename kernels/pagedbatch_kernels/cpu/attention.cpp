// Attention over the paged cache: which pieces of work a step has, and the threads that do them.
//
// A query row's result is the same bits whatever it is batched with: its keys are taken in chunks that begin at
// multiples of CHUNK tokens, each chunk's scores and sums are made in a fixed order, and a shared prefix ends at such
// a border too, where the row's own pass goes on from the state that the shared pass left.

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "tile.h"

namespace pagedbatch {
namespace {

//! Query rows (tokens x query heads of a KV head) of a piece: enough that what a chunk costs by itself is little
//! beside them, and no more than leave each thread several pieces.
constexpr int FEW_ROWS = 64, MANY_ROWS = 192;

int tile_rows(const Step& step) {
  const int64_t num_rows = int64_t(step.num_tokens) * step.num_heads;
  return num_rows >= int64_t(8) * MANY_ROWS * step.num_threads ? MANY_ROWS : FEW_ROWS;
}

//! Tokens [first_token, first_token + num_tokens) of the step, and the keys to read for them.
struct Run {
  const int32_t* block_table;
  int first_token;
  int num_tokens;
  int first_position;  //!< of the first token in its sequence
  int begin, end;      //!< key tokens; a query sees none after itself
  bool resumes, stays;
};

void add_pieces(const Step& step, const Run& run, int window, std::vector<Piece>& pieces) {
  const int queries_per_kv = step.num_heads / step.cache.num_kv_heads;
  const int tile_tokens = std::max(1, tile_rows(step) / queries_per_kv);
  for (int done = 0; done < run.num_tokens; done += tile_tokens) {
    Piece piece;
    piece.block_table = run.block_table;
    piece.first_token = run.first_token + done;
    piece.num_tokens = std::min(tile_tokens, run.num_tokens - done);
    piece.first_position = run.first_position + done;
    piece.begin = std::max<int64_t>(run.begin, int64_t(piece.first_position) - window + 1);
    piece.end = std::min(run.end, piece.first_position + piece.num_tokens);
    piece.resumes = run.resumes;
    piece.stays = run.stays;
    // A block's KV heads are neighbours in memory: together where the rows are few and other threads have work too.
    const bool many = step.num_seqs >= 4 * step.num_threads;
    const int together = many ? std::max(1, FEW_ROWS / (piece.num_tokens * queries_per_kv)) : 1;
    for (int head = 0; head < step.cache.num_kv_heads; head += together) {
      piece.kv_head = head;
      piece.num_kv_heads = std::min(together, step.cache.num_kv_heads - head);
      pieces.push_back(piece);
    }
  }
}

//! The shared prefixes, each as far as it fills whole chunks.
std::vector<Piece> prefix_pieces(const Step& step) {
  std::vector<Piece> pieces;
  for (int i = 0; i < step.num_runs; ++i) {
    const int end = step.prefix_lens[i] / CHUNK * CHUNK;
    if (end == 0) continue;
    Run run{step.prefix_tables + i * step.prefix_table_width, step.run_starts[i],
            step.run_starts[i + 1] - step.run_starts[i], end, 0, end, false, true};
    add_pieces(step, run, NO_WINDOW, pieces);
  }
  return pieces;
}

//! Each sequence's tokens after its prefix, or all.
std::vector<Piece> sequence_pieces(const Step& step) {
  std::vector<Piece> pieces;
  for (int i = 0; i < step.num_seqs; ++i) {
    const int num_tokens = step.query_starts[i + 1] - step.query_starts[i];
    const int prefix = step.num_runs ? step.seq_prefix_lens[i] / CHUNK * CHUNK : 0;
    Run run{step.block_tables + i * step.table_width, step.query_starts[i], num_tokens,
            step.seq_lens[i] - num_tokens, prefix, step.seq_lens[i], prefix > 0, false};
    add_pieces(step, run, step.window, pieces);
  }
  return pieces;
}

template <class T>
void attend(const Step& step, std::vector<Piece> pieces, float* states) {
  // The longest first, so that the threads end together; KV heads of a tile stay neighbours.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& one, const Piece& other) {
    return int64_t(one.end - one.begin) * one.num_tokens > int64_t(other.end - other.begin) * other.num_tokens;
  });
  const int count = pieces.size();
  std::atomic<int> taken{0};
#pragma omp parallel num_threads(step.num_threads) if (count > 1)
  {
    Tile<T> tile(step);
    // A thread takes its next piece before it begins one, so that it can fetch what that needs.
    for (int i = taken++, next; i < count; i = next) {
      next = taken++;
      tile.attend(pieces[i], next < count ? &pieces[next] : nullptr, states);
    }
  }
}

template <class T>
void attend(const Step& step) {
  std::unique_ptr<float[]> states;
  if (step.num_runs) states.reset(new float[int64_t(step.num_tokens) * step.num_heads * state_size<T>(step)]);
  attend<T>(step, prefix_pieces(step), states.get());
  attend<T>(step, sequence_pieces(step), states.get());
}

}  // namespace
}  // namespace pagedbatch

extern "C" void pagedbatch_attention(const pagedbatch::Step* step) {
  if (step->is_bfloat16) {
    pagedbatch::attend<pagedbatch::BFloat16>(*step);
  } else {
    pagedbatch::attend<float>(*step);
  }
}
