// Paged grouped-query attention over a half-precision cache.
//
// Per layer and block of 16 tokens, per KV head:   K transposed [head_dim][16]   then   V [16][head_dim]
//
// so that a score of 16 tokens is one vector, and so is 16 numbers of a value. A row's sums run over its own tokens in
// the order of their blocks: the result does not depend on what else is computed, on chunking, or on who wrote the cache.
#pragma once
#include <cmath>

#include "memory.h"
#include "simd.h"

namespace chorus {

constexpr int SLOTS = 16;  // tokens in a block
#if defined(__AVX512F__)
constexpr int ROWS = 4;  // rows of a prompt at a time
constexpr int WIDE = 2;  // vectors of a value at a time
#else
constexpr int ROWS = 2;
constexpr int WIDE = 1;
#endif

struct Cache {
  int layers = 0, blocks = 0, kv_heads = 0, head_dim = 0;
  half* data = nullptr;

  size_t head_halves() const { return size_t(2) * SLOTS * head_dim; }
  size_t bytes() const { return size_t(layers) * blocks * kv_heads * head_halves() * sizeof(half); }
  half* head(int layer, int block, int kv) const {
    return data + ((size_t(layer) * blocks + block) * kv_heads + kv) * head_halves();
  }
  // Values that a half cannot hold are cut: a masked slot is multiplied by 0, and that must give 0.
  void write(int layer, int block, int slot, int kv, const float* k, const float* v) const {
    const vf most = all(65504.0f);
    half *keys = head(layer, block, kv), *values = keys + SLOTS * head_dim + slot * head_dim, column[LANES];
    for (int d = 0; d < head_dim; d += LANES) {
      store_half(column, -larger(-larger(load(k + d), -most), -most));
      for (int i = 0; i < LANES; i++) keys[(d + i) * SLOTS + slot] = column[i];
      store_half(values + d, -larger(-larger(load(v + d), -most), -most));
    }
  }
};

// `R` rows at positions first..first+R-1 of one sequence, `G` query heads of KV head `kv`.
// q[r], out[r]: the row's G heads of head_dim floats; q is scaled already. `room` holds R * G * (context + 16) floats.
template <int R, int G>
static void attend(const Cache& cache, int layer, int kv, const int32_t* table, int first, const float* const* q,
                   float* const* out, float* room) {
  const int dim = cache.head_dim, blocks = (first + R - 1) / SLOTS + 1, stride = blocks * SLOTS;
  const vf nothing = all(-INFINITY);
  vf most[R * G];
  for (int i = 0; i < R * G; i++) most[i] = nothing;
  for (int b = 0; b < blocks; b++) {
    const half* k = cache.head(layer, table[b], kv);
    vf score[R * G];
#pragma GCC unroll 16
    for (int i = 0; i < R * G; i++) score[i] = vf{};
    for (int d = 0; d < dim; d++) {
      const vf key = load_half(k + d * SLOTS);
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
        most[i] = larger(most[i], score[i]);
        store(room + i * stride + b * SLOTS, score[i]);
      }
    }
  }
  float inverse[R * G];
  for (int r = 0; r < R; r++) {
    const int own = (first + r) / SLOTS + 1;  // blocks this row may see
    for (int i = r * G; i < (r + 1) * G; i++) {
      float* at = room + i * stride;
      const vf top = all(maximum(most[i]));
      vf total{};
      for (int b = 0; b < own; b++, at += SLOTS) {
        const vf s = load(at), e = choose(s > all(-1e30f), exponential(s - top), vf{});
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
    for (int b = 0; b < blocks; b++) {
      const half* v = cache.head(layer, table[b], kv) + SLOTS * dim + part;
      for (int t = 0; t < SLOTS; t++, v += dim) {
        vf value[WIDE];
#pragma GCC unroll 2
        for (int w = 0; w < WIDE; w++) value[w] = load_half(v + w * LANES);
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
