// Paged grouped-query attention over a cache of floats or halves.
//
// A row's sums run over its own tokens in the order of their blocks: the result does not depend on what else is
// computed, on chunking, or on who wrote the cache.
#pragma once
#include "cache.h"

namespace chorus {

#if defined(__AVX512F__)
constexpr int ROWS = 4;  // rows of a prompt at a time
constexpr int WIDE = 2;  // vectors of a value at a time
#else
constexpr int ROWS = 2;
constexpr int WIDE = 1;
#endif

// `R` rows at positions first..first+R-1 of one sequence, `G` query heads of KV head `kv`.
// q[r], out[r]: the row's G heads of head_dim floats; q is scaled already. `room` holds R * G * (context + 16) floats.
// With a window a row sees itself and the window - 1 tokens before it.
template <Kv KIND, int R, int G>
static void attend(const Cache& cache, int layer, int kv, const int32_t* table, int first, int window,
                   const float* const* q, float* const* out, float* room) {
  typedef Kept<KIND> Number;
  const int dim = cache.head_dim, blocks = (first + R - 1) / SLOTS + 1, stride = blocks * SLOTS;
  const int begin = window && first >= window ? (first - window + 1) / SLOTS : 0;
  const vf nothing = all(-INFINITY);
  vf most[R * G];
  for (int i = 0; i < R * G; i++) most[i] = nothing;
  for (int b = begin; b < blocks; b++) {
    auto* const k = cache.head<KIND>(layer, table[b], kv);
    vf score[R * G];
#pragma GCC unroll 16
    for (int i = 0; i < R * G; i++) score[i] = vf{};
    for (int d = 0; d < dim; d++) {
      const vf key = Number::get(k + d * SLOTS);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) score[r * G + g] = fma(all(q[r][g * dim + d]), key, score[r * G + g]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const auto hidden = lanes() > all(float(first + r - b * SLOTS));
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) {
        const int i = r * G + g;
        score[i] = choose(hidden, nothing, score[i]);
        if (window) score[i] = choose(all(float(first + r - window + 1 - b * SLOTS)) > lanes(), nothing, score[i]);
        most[i] = larger(most[i], score[i]);
        store(room + i * stride + b * SLOTS, score[i]);
      }
    }
  }
  float inverse[R * G];
  for (int r = 0; r < R; r++) {
    const int own = (first + r) / SLOTS + 1;  // blocks this row may see
    for (int i = r * G; i < (r + 1) * G; i++) {
      float* at = room + i * stride + begin * SLOTS;
      const vf top = all(maximum(most[i]));
      vf total{};
      for (int b = begin; b < own; b++, at += SLOTS) {
        const vf s = load(at), e = choose(s > all(-INFINITY), exponential(s - top), vf{});
        store(at, e);
        total = total + e;
      }
      for (int b = own; b < blocks; b++, at += SLOTS) store(at, vf{});
      inverse[i] = 1.0f / sum(total);
    }
  }
  for (int part = 0; part < dim; part += WIDE * LANES) {
    vf total[WIDE * R * G];
#pragma GCC unroll 32
    for (int i = 0; i < WIDE * R * G; i++) total[i] = vf{};
    for (int b = begin; b < blocks; b++) {
      const auto* v = cache.head<KIND>(layer, table[b], kv) + SLOTS * dim + part;
      for (int t = 0; t < SLOTS; t++, v += dim) {
        vf value[WIDE];
#pragma GCC unroll 2
        for (int w = 0; w < WIDE; w++) value[w] = Number::get(v + w * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < R * G; i++) {
          const vf p = all(room[i * stride + b * SLOTS + t]);
#pragma GCC unroll 2
          for (int w = 0; w < WIDE; w++) total[i * WIDE + w] = fma(p, value[w], total[i * WIDE + w]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int g = 0; g < G; g++)
        for (int w = 0, i = r * G + g; w < WIDE; w++)
          store(out[r] + g * dim + part + w * LANES, total[i * WIDE + w] * all(inverse[i]));
  }
}

}  // namespace chorus
