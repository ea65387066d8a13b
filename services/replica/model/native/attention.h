// Paged grouped-query attention over a half-precision cache.
//
// Per layer and block of 16 tokens, per KV head:   K transposed [head_dim][16]   then   V [16][head_dim]
//
// so that a score of 16 tokens is one vector, and so is 16 numbers of a value. A row's sums run over its own tokens in
// the order of their blocks: the result does not depend on what else is computed, on chunking, or on who wrote the cache.
#pragma once
#include <cmath>
#include <vector>

#include "simd.h"

namespace chorus {

constexpr int SLOTS = 16;  // tokens in a block

struct Cache {
  int layers = 0, blocks = 0, kv_heads = 0, head_dim = 0;
  half* data = nullptr;

  size_t head_halves() const { return size_t(2) * SLOTS * head_dim; }
  half* head(int layer, int block, int kv) const {
    return data + ((size_t(layer) * blocks + block) * kv_heads + kv) * head_halves();
  }
  void write(int layer, int block, int slot, int kv, const float* k, const float* v) const {
    half* at = head(layer, block, kv);
    for (int d = 0; d < head_dim; d++) at[d * SLOTS + slot] = float_to_half(k[d]);
    half* value = at + SLOTS * head_dim + slot * head_dim;
    for (int d = 0; d < head_dim; d++) value[d] = float_to_half(v[d]);
  }
};

// `R` rows at positions first..first+R-1 of one sequence, `G` query heads of KV head `kv`.
// q[r], out[r]: the row's G heads of head_dim floats; q is scaled already. `room` holds R * G * (context + 16) floats.
template <int R, int G>
static void attend(const Cache& cache, int layer, int kv, const int32_t* table, int first, const float* const* q,
                   float* const* out, float* room) {
  const int dim = cache.head_dim, blocks = (first + R - 1) / SLOTS + 1, stride = blocks * SLOTS;
  vf most[R * G];
  for (int i = 0; i < R * G; i++) most[i] = all(-INFINITY);
  const vf lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int b = 0; b < blocks; b++) {
    const half* k = cache.head(layer, table[b], kv);
    vf score[R * G];
    for (int i = 0; i < R * G; i++) score[i] = vf{};
    for (int d = 0; d < dim; d++) {
      const vf key = load_half(k + d * SLOTS);
      for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) score[r * G + g] = fma(all(q[r][g * dim + d]), key, score[r * G + g]);
    }
    for (int r = 0; r < R; r++) {
      const vf seen = all(float(first + r - b * SLOTS));
      for (int g = 0; g < G; g++) {
        const int i = r * G + g;
        score[i] = lane <= seen ? score[i] : all(-INFINITY);
        most[i] = larger(most[i], score[i]);
        store(room + i * stride + b * SLOTS, score[i]);
      }
    }
  }
  float inverse[R * G];
  for (int r = 0; r < R; r++) {
    const int own = (first + r) / SLOTS + 1;  // blocks this row may see
    for (int g = 0; g < G; g++) {
      const int i = r * G + g;
      const vf top = all(maximum(most[i]));
      vf total{};
      for (int b = 0; b < own; b++) {
        float* at = room + i * stride + b * SLOTS;
        const vf s = load(at);
        const vf e = s == all(-INFINITY) ? vf{} : exponential(s - top);
        store(at, e);
        total += e;
      }
      for (int b = own; b < blocks; b++) store(room + i * stride + b * SLOTS, vf{});
      inverse[i] = 1.0f / sum(total);
    }
  }
  for (int part = 0; part < dim; part += 2 * LANES) {
    const bool two = part + LANES < dim;
    vf near[R * G], far[R * G];
    for (int i = 0; i < R * G; i++) near[i] = far[i] = vf{};
    for (int b = 0; b < blocks; b++) {
      const half* v = cache.head(layer, table[b], kv) + SLOTS * dim + part;
      for (int t = 0; t < SLOTS; t++) {
        const vf a = load_half(v + t * dim), z = two ? load_half(v + t * dim + LANES) : vf{};
        for (int i = 0; i < R * G; i++) {
          const vf p = all(room[i * stride + b * SLOTS + t]);
          near[i] = fma(p, a, near[i]);
          far[i] = fma(p, z, far[i]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int g = 0; g < G; g++) {
        store(out[r] + g * dim + part, near[r * G + g] * all(inverse[r * G + g]));
        if (two) store(out[r] + g * dim + part + LANES, far[r * G + g] * all(inverse[r * G + g]));
      }
  }
}

}  // namespace chorus
