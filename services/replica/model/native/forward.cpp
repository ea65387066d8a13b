// One forward pass of a Llama-family model per call: rows of any sequences, prompts' chunks and single tokens mixed.
//
//   embed -> per layer [ norm, qkv, rotate, cache, attend, o (+), norm, gate & up -> silu, down (+) ] -> norm -> head
//
// One parallel region, static shares between barriers. Plain C doors at the end; the caller has checked its arguments.
#include <cstdint>
#include <memory>
#include <new>
#include <sys/mman.h>

#include "attention.h"
#include "matrix.h"
#include "team.h"

namespace chorus {

struct Shape {  // mirrored in native/__init__.py
  int32_t vocab, hidden, layers, heads, kv_heads, head_dim, ffn, context;
  int32_t blocks, threads, residual, qk_norm;
  float eps, theta;
};

struct Chunk {  // rows [row, row + count) of one sequence, from position `start`
  int32_t row, count, start, table;
};

struct Step {
  int32_t rows, chunks, logits;
  const int32_t* tokens;
  const Chunk* chunk;
  const int32_t* tables;       // all block tables, one after another
  const int32_t* logits_rows;  // which rows need logits
  float* out;                  // [logits][vocab]
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<float> norm, ffn_norm, q_norm, k_norm, qkv_bias;
};

static void* big_memory(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(at, bytes, MADV_HUGEPAGE);
#endif
  return at;
}

template <class T>
struct Room {  // grows, never shrinks
  std::vector<T> data;
  T* need(size_t count) {
    if (data.size() < count) data.resize(count);
    return data.data();
  }
};

class Model {
 public:
  explicit Model(const Shape& shape) : s(shape), team(shape.threads), layers(shape.layers), scores(shape.threads) {
    cache = {s.layers, s.blocks, s.kv_heads, s.head_dim, nullptr};
    cache_bytes = size_t(s.layers) * s.blocks * s.kv_heads * cache.head_halves() * sizeof(half);
    cache.data = static_cast<half*>(big_memory(cache_bytes));
    frequencies.resize(s.head_dim / 2);
    for (int i = 0; i < s.head_dim / 2; i++) frequencies[i] = std::pow(double(s.theta), -2.0 * i / s.head_dim);
  }
  ~Model() { munmap(cache.data, cache_bytes); }

  const Shape s;
  Team team;
  std::vector<Layer> layers;
  Matrix head;
  std::vector<float> embedding, norm;
  std::vector<double> frequencies;

  void forward(const Step& step) {
    const int n = step.rows, wide = std::max(s.hidden, std::max(s.ffn, s.heads * s.head_dim)), passes = 1 + s.residual;
    x = x_room.need(size_t(n) * s.hidden);
    qkv = qkv_room.need(size_t(n) * qkv_width());
    mid = mid_room.need(size_t(n) * std::max(s.ffn, s.heads * s.head_dim));
    rows = {codes_room.need(size_t(n) * passes * wide), scales_room.need(size_t(n) * passes * wide / BLOCK),
            sums_room.need(size_t(n) * passes * wide / BLOCK)};
    plan_attention(step);
    team.run([&](int me) { work(step, me); });
  }

 private:
  struct Piece {  // one or two rows of a chunk, one KV head
    int32_t row, count, position, table, kv;
  };

  int qkv_width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

  void plan_attention(const Step& step) {
    pieces.clear();
    for (int c = 0; c < step.chunks; c++) {
      const Chunk& chunk = step.chunk[c];
      for (int i = 0; i < chunk.count; i += 2)
        for (int kv = 0; kv < s.kv_heads; kv++)
          pieces.push_back({chunk.row + i, std::min(2, chunk.count - i), chunk.start + i, chunk.table, kv});
    }
    next_piece.assign(s.layers, 0);
  }

  void work(const Step& step, int me) {
    const int n = step.rows;
    int from, to;
    Team::share(n, 1, me, team.size(), from, to);
    for (int r = from; r < to; r++)
      std::memcpy(x + size_t(r) * s.hidden, embedding.data() + size_t(step.tokens[r]) * s.hidden, s.hidden * 4);
    for (int l = 0; l < s.layers; l++) layer(step, l, from, to, me);
    if (step.logits) logits(step, me);
  }

  void layer(const Step& step, int l, int from, int to, int me) {
    const Layer& w = layers[l];
    const int n = step.rows, heads_width = s.heads * s.head_dim;
    for (int r = from; r < to; r++) normalise(x + size_t(r) * s.hidden, w.norm, r);
    team.meet();
    multiply(w.qkv, n, me, [&](int panel, int row, const vf* y) {
      float* at = qkv + size_t(row) * qkv_width() + panel * LANES;
      for (int p = 0; p < 2; p++) {
        vf v = y[p];
        if (!w.qkv_bias.empty()) v += load(w.qkv_bias.data() + (panel + p) * LANES);
        store(at + p * LANES, v);
      }
    });
    team.meet();
    for (int c = 0; c < step.chunks; c++) {
      const Chunk& chunk = step.chunk[c];
      for (int r = std::max(from, chunk.row); r < std::min(to, chunk.row + chunk.count); r++)
        place(l, r, chunk.start + r - chunk.row, step.tables + chunk.table);
    }
    team.meet();
    attention(step, l, me);
    team.meet();
    for (int r = from; r < to; r++) quantise_row(mid + size_t(r) * heads_width, heads_width, rows, r, s.residual);
    team.meet();
    add_product(w.o, n, me);
    team.meet();
    for (int r = from; r < to; r++) normalise(x + size_t(r) * s.hidden, w.ffn_norm, r);
    team.meet();
    multiply(w.gate_up, n, me, [&](int panel, int row, const vf* y) {
      const vf gate = y[0], lifted = gate / (all(1.0f) + exponential(-gate));
      store(mid + size_t(row) * s.ffn + panel / 2 * LANES, lifted * y[1]);
    });
    team.meet();
    for (int r = from; r < to; r++) quantise_row(mid + size_t(r) * s.ffn, s.ffn, rows, r, s.residual);
    team.meet();
    add_product(w.down, n, me);
    team.meet();
  }

  template <class Put>
  void multiply(const Matrix& m, int n, int me, const Put& put) {
    int from, to;
    Team::share(m.panels, 2, me, team.size(), from, to);
    product<2>(m, from, to, rows, n, s.residual, put);
  }

  void add_product(const Matrix& m, int n, int me) {
    multiply(m, n, me, [&](int panel, int row, const vf* y) {
      float* at = x + size_t(row) * s.hidden + panel * LANES;
      store(at, load(at) + y[0]);
      store(at + LANES, load(at + LANES) + y[1]);
    });
  }

  void normalise(const float* from, const std::vector<float>& weight, int row) {
    float y[8192];
    rms(from, weight.data(), s.hidden, y);
    quantise_row(y, s.hidden, rows, row, s.residual);
  }

  void rms(const float* from, const float* weight, int width, float* to) const {
    vf squares{};
    for (int i = 0; i < width; i += LANES) squares = fma(load(from + i), load(from + i), squares);
    const vf scale = all(1.0f / std::sqrt(sum(squares) / float(width) + s.eps));
    for (int i = 0; i < width; i += LANES) store(to + i, load(from + i) * scale * load(weight + i));
  }

  // Rotate a row's queries and keys to its position, scale the queries, write keys and values to the cache.
  void place(int l, int row, int position, const int32_t* table) {
    float* q = qkv + size_t(row) * qkv_width();
    float *k = q + s.heads * s.head_dim, *v = k + s.kv_heads * s.head_dim;
    const float scale = 1.0f / std::sqrt(float(s.head_dim));
    float cosine[256], sine[256];
    for (int i = 0; i < s.head_dim / 2; i++) {
      cosine[i] = float(std::cos(position * frequencies[i]));
      sine[i] = float(std::sin(position * frequencies[i]));
    }
    for (int h = 0; h < s.heads + s.kv_heads; h++) {
      float* at = q + h * s.head_dim;
      if (s.qk_norm) rms(at, (h < s.heads ? layers[l].q_norm : layers[l].k_norm).data(), s.head_dim, at);
      rotate(at, cosine, sine);
      if (h < s.heads)
        for (int d = 0; d < s.head_dim; d++) at[d] *= scale;
    }
    for (int kv = 0; kv < s.kv_heads; kv++)
      cache.write(l, table[position / SLOTS], position % SLOTS, kv, k + kv * s.head_dim, v + kv * s.head_dim);
  }

  void rotate(float* at, const float* cosine, const float* sine) const {
    const int half_dim = s.head_dim / 2;
    for (int i = 0; i < half_dim; i++) {  // a pair is (i, i + half): the loader undoes GGUF's interleaving
      const float a = at[i], b = at[i + half_dim];
      at[i] = a * cosine[i] - b * sine[i];
      at[i + half_dim] = b * cosine[i] + a * sine[i];
    }
  }

  void attention(const Step& step, int l, int me) {
    const int group = s.heads / s.kv_heads;
    for (;;) {
      const int at = __atomic_fetch_add(&next_piece[l], 1, __ATOMIC_RELAXED);
      if (at >= int(pieces.size())) return;
      const Piece& p = pieces[at];
      float* room = scores[me].need(size_t(2) * group * (s.context + 2 * SLOTS));
      const float* q[2];
      float* out[2];
      for (int r = 0; r < p.count; r++) {
        q[r] = qkv + size_t(p.row + r) * qkv_width() + p.kv * group * s.head_dim;
        out[r] = mid + (size_t(p.row + r) * s.heads + p.kv * group) * s.head_dim;
      }
      if (p.count == 2) by_group<2>(group, l, p, step.tables, q, out, room);
      else by_group<1>(group, l, p, step.tables, q, out, room);
    }
  }

  template <int R>
  void by_group(int group, int l, const Piece& p, const int32_t* tables, const float** q, float** out, float* room) {
    const int32_t* table = tables + p.table;
    switch (group) {
      case 3: return attend<R, 3>(cache, l, p.kv, table, p.position, q, out, room);
      case 4: return attend<R, 4>(cache, l, p.kv, table, p.position, q, out, room);
      case 2: return attend<R, 2>(cache, l, p.kv, table, p.position, q, out, room);
    }
    for (int g = 0; g < group; g++) {
      const float* one_q[2];
      float* one_out[2];
      for (int r = 0; r < R; r++) one_q[r] = q[r] + g * s.head_dim, one_out[r] = out[r] + g * s.head_dim;
      attend<R, 1>(cache, l, p.kv, table, p.position, one_q, one_out, room);
    }
  }

  void logits(const Step& step, int me) {
    int from, to;
    Team::share(step.logits, 1, me, team.size(), from, to);
    for (int i = from; i < to; i++) normalise(x + size_t(step.logits_rows[i]) * s.hidden, norm, i);
    team.meet();
    multiply(head, step.logits, me, [&](int panel, int row, const vf* y) {
      float* at = step.out + size_t(row) * s.vocab;
      for (int p = 0; p < 2; p++) {
        const int column = (panel + p) * LANES;
        if (column + LANES <= s.vocab) store(at + column, y[p]);
        else
          for (int i = 0; column + i < s.vocab; i++) at[column + i] = y[p][i];
      }
    });
  }

  Cache cache;
  size_t cache_bytes;
  Room<float> x_room, qkv_room, mid_room, scales_room, sums_room;
  Room<int8_t> codes_room;
  std::vector<Room<float>> scores;
  float *x = nullptr, *qkv = nullptr, *mid = nullptr;
  Rows rows{};
  std::vector<Piece> pieces;
  std::vector<int> next_piece;
};

}  // namespace chorus

using namespace chorus;

extern "C" {

void* chorus_create(const Shape* shape) {
  try {
    return new Model(*shape);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void chorus_destroy(void* model) { delete static_cast<Model*>(model); }

// `parts` tensors (raw file blocks, rows_out[i] x cols) stacked into one matrix; interleaved panel by panel when asked.
// which: 0 qkv, 1 o, 2 gate_up, 3 down, 4 head. Rows of a part are a multiple of 16, except of the head.
int chorus_matrix(void* model, int layer, int which, int kind, int cols, int parts, const uint8_t* const* raw,
                  const int32_t* rows_out, int interleave) {
  Model& m = *static_cast<Model*>(model);
  int total = 0;
  for (int i = 0; i < parts; i++) total += (rows_out[i] + LANES - 1) / LANES * LANES;
  Matrix made = make_matrix(Kind(kind), (total + 31) / 32 * 32, cols);
  if (!made.data) return 1;
  int base = 0;
  for (int i = 0; i < parts; i++) {
    const int panels = (rows_out[i] + LANES - 1) / LANES;
    for (int p = 0; p < panels; p++)
      pack_panel(made, interleave ? p * parts + i : base + p, raw[i], p * LANES, rows_out[i]);
    base += panels;
  }
  if (!interleave && base < made.panels) pack_panel(made, base, raw[0], rows_out[0], rows_out[0]);  // an empty one
  if (which == 4) m.head = made;
  else {
    Layer& l = m.layers[layer];
    (which == 0 ? l.qkv : which == 1 ? l.o : which == 2 ? l.gate_up : l.down) = made;
  }
  return 0;
}

// which: 0 norm, 1 ffn_norm, 2 q_norm, 3 k_norm, 4 qkv_bias, 5 output norm, 6 embedding [vocab][hidden]
void chorus_vector(void* model, int layer, int which, const float* data, int64_t count) {
  Model& m = *static_cast<Model*>(model);
  std::vector<float>& to = which == 5 ? m.norm : which == 6 ? m.embedding
                           : which == 0 ? m.layers[layer].norm : which == 1 ? m.layers[layer].ffn_norm
                           : which == 2 ? m.layers[layer].q_norm : which == 3 ? m.layers[layer].k_norm
                                                                              : m.layers[layer].qkv_bias;
  to.assign(data, data + count);
}

void chorus_forward(void* model, const Step* step) { static_cast<Model*>(model)->forward(*step); }

const char* chorus_isa() {
#if defined(__AVX512VNNI__)
  return "avx512-vnni";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}
}
