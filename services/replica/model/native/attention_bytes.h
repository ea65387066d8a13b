// The same over a cache of bytes, in whole numbers: an instruction makes twice as many products of them.
//
//     score = (q . k) * scale of q * scale of k                        q in shorts, a scale for each row and head
//     out   = sum over tiles of 8 blocks:  (w . v) * scale of w        w = e^(score - greatest) * scale of v, in shorts
//
// Products in brackets are exact. The rest comes in the order of the blocks, and a tile is the same one for everybody:
// the result does not depend on what else is computed, on chunking, or on who wrote the cache.
#pragma once
#include "attention.h"

namespace chorus {

constexpr int TILE_BLOCKS = 8;  // whose weights share a scale
constexpr int TILE_TOKENS = TILE_BLOCKS * SLOTS;
constexpr int AHEAD = 6;        // blocks that are asked for before they are needed
constexpr float SHORT = 32767;  // the largest code of a query or a weight

constexpr int tiles_of(int blocks) { return (blocks + TILE_BLOCKS - 1) / TILE_BLOCKS; }

// Floats of room for `rows` rows of heads over a context: scores, their codes, a scale for each tile, and the queries.
constexpr size_t bytes_room(int rows, int dim, int context) {
  const size_t tiles = tiles_of(context / SLOTS + 1);
  return rows * (tiles * TILE_TOKENS + tiles * TILE_TOKENS / 2 + tiles + dim / 2);
}

// `R` rows at positions first..first+R-1 of one sequence, `G` query heads of KV head `kv`.
template <int R, int G>
class ByteAttention {
  static constexpr int N = R * G, TURNS = N < 6 ? 2 : 1;  // sums in turn, where one would wait for itself

 public:
  // With a window a row sees itself and the window - 1 tokens before it. `room`: bytes_room(N, ...) floats.
  ByteAttention(const Cache& cache, int layer, int kv, const int32_t* table, int first, int window, float* room)
      : cache_(cache), layer_(layer), kv_(kv), table_(table), first_(first), window_(window), dim_(cache.head_dim),
        begin_(window && first >= window ? (first - window + 1) / SLOTS : 0), blocks_((first + R - 1) / SLOTS + 1),
        tiles_(tiles_of(blocks_)), stride_(tiles_ * TILE_TOKENS), scores_(room), scales_(scores_ + N * stride_),
        codes_(reinterpret_cast<int16_t*>(scales_ + N * tiles_)), queries_(codes_ + N * stride_) {}

  // q[r], out[r]: the row's G heads of head_dim floats; q is scaled already.
  void run(const float* const* q, float* const* out) {
    for (int b = begin_; b < std::min(blocks_, begin_ + AHEAD); b++) ask_for(b);
    for (int i = 0; i < N; i++) take_query(q[i / G] + i % G * dim_, i);
    for (int b = begin_; b < blocks_; b++) {
      if (b + AHEAD < blocks_) ask_for(b + AHEAD);
      score(b);
    }
    for (int i = 0; i < N; i++) weigh(i);
    for (int part = 0; part < dim_; part += WIDE * LANES) add_values(part, out);
    for (int i = 0; i < N; i++) {
      float* const at = out[i / G] + i % G * dim_;
      mix(at, dim_, 1.0f / float(mixed_together(dim_)), at);
    }
  }

 private:
  const int8_t* head(int b) const { return cache_.head<KV_I8>(layer_, table_[b], kv_); }

  // (A function that does nothing but this is taken for one that does nothing.)
  ALWAYS void ask_for(int b) const {
    const int8_t* const at = head(b);
    const int bytes = int(cache_.head_bytes());
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
  }

  // In pairs, those of all rows side by side.
  void take_query(const float* q, int i) {
    float mixed[BYTES_DIM_MAX];
    mix(q, dim_, 1.0f / float(mixed_together(dim_)), mixed);
    q_scale_[i] = all(to_codes(mixed, dim_, SHORT, [&](int d, vi codes) {
      int16_t shorts[LANES];
      store_shorts(shorts, codes);
      for (int j = 0; j < LANES; j += 2) std::memcpy(queries_ + (d + j) * N + 2 * i, shorts + j, 4);
    }));
    greatest_[i] = all(-INFINITY);
  }

  ALWAYS void score(int b) {
    const int8_t* const k = head(b);
    vi sums[TURNS * N];
#pragma GCC unroll 32
    for (int i = 0; i < TURNS * N; i++) sums[i] = vi{};
    for (int d = 0; d < dim_; d += 2 * TURNS)
#pragma GCC unroll 2
      for (int t = 0; t < TURNS; t++) {
        const vs keys = load_pairs(k + (d + 2 * t) * SLOTS);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) add_dots(sums[t * N + i], keys, queries_ + (d + 2 * t) * N + 2 * i);
      }
    const vf k_scale = load(cache_.scales(k));
    const bool edge = (b + 1) * SLOTS > first_ + 1 || (window_ && b * SLOTS < first_ + R - window_);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      if (TURNS == 2) sums[i] = sums[i] + sums[(TURNS - 1) * N + i];
      vf score = to_float(sums[i]) * (q_scale_[i] * k_scale);
      if (edge) {
        const float row = float(first_ + i / G - b * SLOTS);  // counted from this block's first token
        score = choose(lanes() > all(row), all(-INFINITY), score);
        if (window_) score = choose(all(row - float(window_ - 1)) > lanes(), all(-INFINITY), score);
      }
      greatest_[i] = larger(greatest_[i], score);
      store(scores_ + i * stride_ + b * SLOTS, score);
    }
  }

  // Scores become codes, tile by tile; what a row may not see is 0.
  void weigh(int i) {
    const int own = (first_ + i / G) / SLOTS + 1;  // blocks this row may see
    const vf top = all(maximum(greatest_[i]));
    vf total{};
    for (int b = begin_, end; b < blocks_; b = end) {
      end = std::min(blocks_, (b / TILE_BLOCKS + 1) * TILE_BLOCKS);
      vf weights[TILE_BLOCKS], most{};
      for (int at = b; at < end; at++) {
        vf& weight = weights[at - b] = vf{};
        if (at >= own) continue;
        const vf s = load(scores_ + i * stride_ + at * SLOTS), e = choose(s > all(-INFINITY), exponential(s - top), vf{});
        total = total + e;
        weight = e * load(cache_.scales(head(at)) + SLOTS);
        most = larger(most, weight);
      }
      const float scale = maximum(most) / SHORT;
      const vf inverse = all(scale > 1e-36f ? 1.0f / scale : 0.0f);
      scales_[i * tiles_ + b / TILE_BLOCKS] = scale;
      for (int at = b; at < end; at++) store_shorts(codes_ + i * stride_ + at * SLOTS, whole(weights[at - b] * inverse));
    }
    const float inverse = 1.0f / sum(total);
    for (int t = begin_ / TILE_BLOCKS; t < tiles_; t++) scales_[i * tiles_ + t] *= inverse;
  }

  ALWAYS void add_values(int part, float* const* out) {
    vf total[WIDE * N];
#pragma GCC unroll 32
    for (int i = 0; i < WIDE * N; i++) total[i] = vf{};
    for (int b = begin_, end; b < blocks_; b = end) {
      const int tile = b / TILE_BLOCKS;
      end = std::min(blocks_, (tile + 1) * TILE_BLOCKS);
      vi sums[WIDE * N];
#pragma GCC unroll 32
      for (int i = 0; i < WIDE * N; i++) sums[i] = vi{};
      for (int at = b; at < end; at++) {
        const int8_t* v = head(at) + SLOTS * dim_ + part * 2;
        for (int t = 0; t < SLOTS; t += 2, v += dim_ * 2) {
          vs values[WIDE];
#pragma GCC unroll 2
          for (int w = 0; w < WIDE; w++) values[w] = load_pairs(v + w * LANES * 2);
#pragma GCC unroll 16
          for (int i = 0; i < N; i++)
#pragma GCC unroll 2
            for (int w = 0; w < WIDE; w++)
              add_dots(sums[i * WIDE + w], values[w], codes_ + i * stride_ + at * SLOTS + t);
        }
      }
#pragma GCC unroll 32
      for (int i = 0; i < WIDE * N; i++)
        total[i] = fma(to_float(sums[i]), all(scales_[i / WIDE * tiles_ + tile]), total[i]);
    }
#pragma GCC unroll 32
    for (int i = 0; i < WIDE * N; i++)
      store(out[i / WIDE / G] + i / WIDE % G * dim_ + part + i % WIDE * LANES, total[i]);
  }

  const Cache& cache_;
  const int layer_, kv_;
  const int32_t* const table_;
  const int first_, window_, dim_, begin_, blocks_, tiles_, stride_;
  float *const scores_, *const scales_;    // [N][tiles * 128], [N][tiles]
  int16_t *const codes_, *const queries_;  // [N][tiles * 128], [head_dim / 2][N][2]
  vf q_scale_[N], greatest_[N];
};

}  // namespace chorus
