// One forward pass of a Llama-family model per call: rows of any sequences, prompts' chunks and single tokens mixed.
//
//   embed -> per layer [ norm, qkv, rotate, cache, attend, o (+), norm, gate & up -> silu, down (+) ] -> norm -> head
//
// Each arrow is a phase of tasks (team.h). Plain C doors at the end; the caller has checked its arguments.
#include <cstdint>

#include "attention.h"
#include "attention_bytes.h"
#include "draw.h"
#include "matrix.h"
#include "memory.h"
#include "team.h"

namespace chorus {

struct Shape {  // mirrored in kernels.py
  int32_t vocab, hidden, layers, heads, kv_heads, head_dim, ffn, context;
  int32_t blocks, threads, precise, qk_norm, window, kv;
  float eps, theta;
  const double* rope_factors;  // [head_dim / 2], or null; read while the model is made, and no later
};

struct Chunk {  // rows [row, row + count) of one sequence, from position `start`; its block table begins at `table`
  int32_t row, count, start, table;
};

struct Step {
  int32_t rows, chunks, wanted, draws;  // `draws`: any of them draws
  const int32_t* tokens;       // [rows]
  const Chunk* chunk;          // [chunks]
  const int32_t* tables;       // all block tables, one after another
  const int32_t* wanted_rows;  // [wanted]: rows whose next token is asked for
  const Draw* draw;            // [wanted]
  int32_t* drawn;              // [wanted]: the tokens; without a draw the best one, the first of equals
  float* logits;               // [wanted][vocab], or null
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<float> norm, ffn_norm, q_norm, k_norm, qkv_bias;
};

constexpr int FEW = 2;          // rows that every member normalises for itself, rather than wait for another
constexpr int ROWS_A_TASK = 8;  // rows that are normalised or rotated in one task
constexpr int PANEL_TASKS = 4;  // tasks of a product, for each member

class Model {
 public:
  explicit Model(const Shape& shape)
      : s(shape), layers(shape.layers), team(shape.threads, shape.layers * 8 + 8), desks_(shape.threads) {
    cache_ = {s.layers, s.blocks, s.kv_heads, s.head_dim, Kv(s.kv), nullptr};
    cache_.data = memory.take_present(cache_.bytes());
    for (auto& desk : desks_) {
      desk.scores.need(s.kv == KV_I8 ? bytes_room(ROWS * group(), s.head_dim, s.context)
                                     : size_t(ROWS) * group() * (s.context + 2 * SLOTS));
      desk.mixed.need(size_t(ROWS) * group() * s.head_dim);
      desk.row.need(s.hidden);
      desk.draw_of_best.need(s.vocab);
    }
    make_turns();
  }

  const Shape s;
  Memory memory;
  std::vector<Layer> layers;
  Matrix embedding, head;
  std::vector<float> norm;
  Team team;

  void forward(const Step& step) {
    const int n = step.rows, most = std::max(n, step.wanted);
    x_.need(size_t(n) * s.hidden);
    qkv_.need(size_t(n) * qkv_width());
    active_.need(size_t(n) * s.ffn);
    normed_.need(most, s.hidden, passes());
    mixed_rows_.need(n, s.heads * s.head_dim, passes());
    active_rows_.need(n, s.ffn, passes());
    for (auto& desk : desks_) {
      desk.normed.need(FEW, s.hidden, passes());
      desk.best.need(size_t(step.wanted) * LANES), desk.where.need(size_t(step.wanted) * LANES);
    }
    logits_ = step.logits;
    if (step.draws && !logits_) own_logits_.need(size_t(step.wanted) * s.vocab), logits_ = own_logits_.data();
    plan_attention(step);
    tops_.assign(size_t(step.wanted) * head_tasks(), Top{});
    team.run([&](Team::Member& me) { work(step, me); });
  }

 private:
  struct Desk {  // what a member works with
    Rows normed;
    Buffer<float> scores, mixed, row, best, where;
    DrawOfBest draw_of_best;
  };
  struct Piece {  // one to ROWS rows of a chunk, one KV head; a lone row brings its own key and value
    int32_t row, count, position, table, kv;
    bool alone;
  };

  int passes() const { return s.precise ? 2 : 1; }
  int group() const { return s.heads / s.kv_heads; }
  int qkv_width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }
  int head_tasks() const { return std::min(head.panels / 2, PANEL_TASKS * 2 * team.size()); }
  float* x_row(int row) { return x_.data() + size_t(row) * s.hidden; }
  float* qkv_row(int row) { return qkv_.data() + size_t(row) * qkv_width(); }

  // cos and sin of position / theta^(2i / head_dim) / factor i, from extended precision: no library's last bit shows.
  void make_turns() {
    const int half_dim = s.head_dim / 2;
    turns_.need(size_t(s.context) * s.head_dim);
    for (int i = 0; i < half_dim; i++) {
      long double frequency = powl(s.theta, -2.0L * i / s.head_dim);
      if (s.rope_factors) frequency /= s.rope_factors[i];
      for (int at = 0; at < s.context; at++) {
        turns_[size_t(at) * s.head_dim + i] = float(cosl(at * frequency));
        turns_[size_t(at) * s.head_dim + half_dim + i] = float(sinl(at * frequency));
      }
    }
  }

  // Prompts first: the short pieces of single rows fill the time until all members are done.
  void plan_attention(const Step& step) {
    pieces_.clear();
    for (const bool alone : {false, true}) {
      for (int c = 0; c < step.chunks; c++) {
        const Chunk& chunk = step.chunk[c];
        for (int i = 0; i < chunk.count && alone == (chunk.count == 1); i += ROWS)
          for (int kv = 0; kv < s.kv_heads; kv++)
            pieces_.push_back({chunk.row + i, std::min(ROWS, chunk.count - i), chunk.start + i, chunk.table, kv, alone});
      }
      if (!alone) prompts_ = !pieces_.empty();
    }
  }

  void work(const Step& step, Team::Member& me) {
    by_rows(me, step.rows, [&](int r) { unpack_row(embedding, step.tokens[r], x_row(r)); });
    for (int l = 0; l < s.layers; l++) layer(step, l, me);
    if (step.wanted) choose_tokens(step, me);
  }

  void layer(const Step& step, int l, Team::Member& me) {
    const Layer& w = layers[l];
    const int n = step.rows;
    normed_product(w.qkv, w.norm, n, 2, me, [&](int panel, int row, const vf* y) {
      float* at = qkv_row(row) + panel * LANES;
      for (int p = 0; p < 2; p++, at += LANES)
        store(at, w.qkv_bias.empty() ? y[p] : y[p] + load(w.qkv_bias.data() + (panel + p) * LANES));
    });
    if (prompts_) place_prompts(step, l, me);
    me.each(int(pieces_.size()), [&](int i) { attention(step, l, pieces_[i], desks_[me.index]); });
    add_product(w.o, mixed_rows_, n, me);
    normed_product(w.gate_up, w.ffn_norm, n, 4, me, [&](int panel, int row, const vf* y) {
      const vf lifted = y[0] / (all(1.0f) + exponential(-larger(y[0], all(-88.0f))));  // further down it is 0 anyway
      store(active_.data() + size_t(row) * s.ffn + panel / 2 * LANES, lifted * y[1]);
    }, [&](int from, int to) {  // columns that this task made: whole blocks
      for (int r = 0; r < n; r++)
        quantise(active_.data() + size_t(r) * s.ffn + from / 2 * LANES, active_rows_, r, from / 4, (to - from) / 4);
    });
    add_product(w.down, active_rows_, n, me);
  }

  // --- products ------------------------------------------------------------------------------------------

  template <class F>
  void by_rows(Team::Member& me, int n, const F& row) {
    const int step = n < ROWS_A_TASK * team.size() ? 1 : ROWS_A_TASK;
    me.each((n + step - 1) / step, [&](int i) {
      for (int r = i * step; r < std::min(n, (i + 1) * step); r++) row(r);
    });
  }

  struct Nothing {
    void operator()(int, int) const {}
  };

  // The rows of x, normalised and quantised, times a matrix. Tasks are whole `grain`s of panels.
  template <class Put, class Then = Nothing>
  void normed_product(const Matrix& m, const std::vector<float>& weight, int n, int grain,
                      Team::Member& me, const Put& put, const Then& then = {}) {
    Desk& desk = desks_[me.index];
    const bool few = n <= FEW;
    const auto normalise = [&](int r, Rows& to) {
      rms(x_row(r), weight.data(), s.hidden, desk.row.data());
      quantise(desk.row.data(), to, r, 0, s.hidden / BLOCK);
    };
    if (!few) by_rows(me, n, [&](int r) { normalise(r, normed_); });
    bool ready = !few;
    by_panels(m, grain, me, [&](int from, int to) {
      for (int r = 0; !ready && r < n; r++) normalise(r, desk.normed);
      ready = true;
      product(m, from, to, few ? desk.normed : normed_, n, put);
      then(from, to);
    });
  }

  void add_product(const Matrix& m, const Rows& rows, int n, Team::Member& me) {
    by_panels(m, 2, me, [&](int from, int to) {
      product(m, from, to, rows, n, [&](int panel, int row, const vf* y) {
        float* at = x_row(row) + panel * LANES;
        store(at, load(at) + y[0]);
        store(at + LANES, load(at + LANES) + y[1]);
      });
    });
  }

  template <class F>
  void by_panels(const Matrix& m, int grain, Team::Member& me, const F& task) {
    const int tasks = team.size() == 1 ? 1 : std::min(m.panels / grain, PANEL_TASKS * team.size());
    me.each(tasks, [&](int i) {
      int from, to;
      Team::share(m.panels, grain, i, tasks, from, to);
      task(from, to);
    });
  }

  static void rms(const float* from, const float* weight, int width, float eps, float* to) {
    vf squares{};
    for (int i = 0; i < width; i += LANES) squares = fma(load(from + i), load(from + i), squares);
    const vf scale = all(1.0f / std::sqrt(sum(squares) / float(width) + eps));
    for (int i = 0; i < width; i += LANES) store(to + i, load(from + i) * scale * load(weight + i));
  }
  void rms(const float* from, const float* weight, int width, float* to) const { rms(from, weight, width, s.eps, to); }

  // --- attention -----------------------------------------------------------------------------------------

  // Turn `heads` heads from `at` on to a position, normalised first where the model does so.
  void turn(float* at, int heads, const std::vector<float>& head_norm, int position, float scale) {
    const int half_dim = s.head_dim / 2;
    const float *cosine = turns_.data() + size_t(position) * s.head_dim, *sine = cosine + half_dim;
    for (int h = 0; h < heads; h++, at += s.head_dim) {
      if (s.qk_norm) rms(at, head_norm.data(), s.head_dim, at);
      for (int i = 0; i < half_dim; i += LANES) {  // a pair is (i, i + half): the loader undoes GGUF's interleaving
        const vf a = load(at + i), b = load(at + half_dim + i), c = load(cosine + i), d = load(sine + i);
        store(at + i, (a * c - b * d) * all(scale));
        store(at + half_dim + i, (b * c + a * d) * all(scale));
      }
    }
  }

  // A row's queries of one KV head are turned and scaled, its key turned, key and value written to the cache.
  void place(int l, int row, int position, int kv, const int32_t* table) {
    float *q = qkv_row(row), *k = q + (s.heads + kv) * s.head_dim, *v = k + s.kv_heads * s.head_dim;
    turn(q + kv * group() * s.head_dim, group(), layers[l].q_norm, position, 1.0f / std::sqrt(float(s.head_dim)));
    turn(k, 1, layers[l].k_norm, position, 1.0f);
    cache_.write(l, table[position / SLOTS], position % SLOTS, kv, k, v);
  }

  void place_prompts(const Step& step, int l, Team::Member& me) {
    me.each(int(pieces_.size()), [&](int i) {
      const Piece& p = pieces_[i];
      for (int r = 0; !p.alone && r < p.count; r++) place(l, p.row + r, p.position + r, p.kv, step.tables + p.table);
    });
  }

  void attention(const Step& step, int l, const Piece& p, Desk& desk) {
    const int width = group() * s.head_dim;
    const int32_t* table = step.tables + p.table;
    if (p.alone) place(l, p.row, p.position, p.kv, table);
    const float* q[ROWS];
    float* out[ROWS];
    for (int r = 0; r < p.count; r++) {
      q[r] = qkv_row(p.row + r) + p.kv * width;
      out[r] = desk.mixed.data() + r * width;
    }
    if (p.count == ROWS) by_group<ROWS>(l, p, table, 0, q, out, desk);
    else
      for (int r = 0; r < p.count; r++) by_group<1>(l, p, table, r, q + r, out + r, desk);
    for (int r = 0; r < p.count; r++)
      quantise(out[r], mixed_rows_, p.row + r, p.kv * width / BLOCK, width / BLOCK);
  }

  template <int R>
  void by_group(int l, const Piece& p, const int32_t* table, int ahead, const float** q, float** out, Desk& desk) {
    const int at = p.position + ahead;
    switch (cache_.kind) {
      case KV_F32: return attend_as<KV_F32, R>(l, p.kv, table, at, q, out, desk);
      case KV_BF16: return attend_as<KV_BF16, R>(l, p.kv, table, at, q, out, desk);
      case KV_F16: return attend_as<KV_F16, R>(l, p.kv, table, at, q, out, desk);
      case KV_I8: return attend_as<KV_I8, R>(l, p.kv, table, at, q, out, desk);
    }
  }

  // Up to four query heads of a KV head at a time: what the registers hold. The types that few ask for make do with two,
  // which halves what the compiler has to do; a head's bits do not depend on it.
  template <Kv KIND, int R>
  void attend_as(int l, int kv, const int32_t* table, int at, const float** q, float** out, Desk& desk) {
    constexpr int most = KIND == KV_F16 || KIND == KV_I8 ? 4 : 2;
    float* room = desk.scores.data();
    for (int g = 0, n; g < group(); g += n) {
      const float* some_q[R];
      float* some_out[R];
      for (int r = 0; r < R; r++) some_q[r] = q[r] + g * s.head_dim, some_out[r] = out[r] + g * s.head_dim;
      n = std::min(most, group() - g);
      if (n == 1) heads<KIND, R, 1>(l, kv, table, at, some_q, some_out, room);
      else if (n == 2) heads<KIND, R, 2>(l, kv, table, at, some_q, some_out, room);
      else if constexpr (most == 4) {
        if (n == 3) heads<KIND, R, 3>(l, kv, table, at, some_q, some_out, room);
        else heads<KIND, R, 4>(l, kv, table, at, some_q, some_out, room);
      }
    }
  }

  template <Kv KIND, int R, int G>
  void heads(int l, int kv, const int32_t* table, int at, const float* const* q, float* const* out, float* room) {
    if constexpr (KIND == KV_I8) ByteAttention<R, G>(cache_, l, kv, table, at, s.window, room).run(q, out);
    else attend<KIND, R, G>(cache_, l, kv, table, at, s.window, q, out, room);
  }

  // --- the head ------------------------------------------------------------------------------------------

  void choose_tokens(const Step& step, Team::Member& me) {
    const int n = step.wanted, tasks = head_tasks();
    Desk& desk = desks_[me.index];
    if (n > FEW) by_rows(me, n, [&](int r) { normalise_wanted(step, r, normed_, desk); });
    bool ready = n > FEW;
    me.each(tasks, [&](int i) {
      for (int r = 0; !ready && r < n; r++) normalise_wanted(step, r, desk.normed, desk);
      ready = true;
      int from, to;
      Team::share(head.panels, 2, i, tasks, from, to);
      for (int r = 0; r < n * LANES; r += LANES) store(desk.best.data() + r, all(-INFINITY));
      product(head, from, to, n > FEW ? normed_ : desk.normed, n, [&](int panel, int row, const vf* y) {
        for (int p = 0; p < 2; p++) take_logits(row, (panel + p) * LANES, y[p], desk);
      });
      for (int r = 0; r < n; r++) tops_[size_t(r) * tasks + i] = top_of(desk, r);
    });
    me.each(step.draws ? n : 1, [&](int i) {
      for (int r = i; r < (step.draws ? i + 1 : n); r++) {
        Top top{};
        for (int t = 0; t < tasks; t++)
          if (const Top& other = tops_[size_t(r) * tasks + t]; other.value > top.value) top = other;
        step.drawn[r] = drawn(logits_ + size_t(r) * s.vocab, top, step.draw[r], desk);
      }
    });
  }

  int drawn(const float* row, Top top, const Draw& draw, Desk& desk) const {
    if (!(draw.temperature > 0) || !std::isfinite(top.value)) return top.token;
    const Weights weights(row, s.vocab, top.value, draw.temperature);
    if (draw.top_k > 0 || draw.top_p < 1) return desk.draw_of_best(weights, s.vocab, top, draw);
    return draw_of_all(weights, s.vocab, draw);
  }

  void normalise_wanted(const Step& step, int r, Rows& to, Desk& desk) {
    rms(x_row(step.wanted_rows[r]), norm.data(), s.hidden, desk.row.data());
    quantise(desk.row.data(), to, r, 0, s.hidden / BLOCK);
  }

  void take_logits(int row, int column, vf y, Desk& desk) {
    const int left = s.vocab - column;
    if (left < LANES) y = choose(lanes() > all(float(left) - 0.5f), all(-INFINITY), y);
    float *best = desk.best.data() + row * LANES, *where = desk.where.data() + row * LANES;
    const auto better = y > load(best);
    store(best, choose(better, y, load(best)));
    store(where, choose(better, all(float(column / LANES)), load(where)));
    if (!logits_ || left <= 0) return;
    float* at = logits_ + size_t(row) * s.vocab + column;
    if (left >= LANES) return store(at, y);
    float some[LANES];
    store(some, y);
    std::copy(some, some + left, at);
  }

  static Top top_of(Desk& desk, int row) {
    Top top{};
    for (int i = 0; i < LANES; i++) {
      const float value = desk.best[row * LANES + i];
      if (!(value > -INFINITY)) continue;
      const int token = int(desk.where[row * LANES + i]) * LANES + i;
      if (value > top.value || (value == top.value && token < top.token)) top = {value, token};
    }
    return top;
  }

  Cache cache_;
  Buffer<float> turns_, x_, qkv_, active_, own_logits_;
  float* logits_ = nullptr;  // of this step
  Rows normed_, mixed_rows_, active_rows_;
  std::vector<Desk> desks_;
  std::vector<Piece> pieces_;
  std::vector<Top> tops_;
  bool prompts_ = false;
};

}  // namespace chorus

using namespace chorus;

extern "C" {

void* chorus_create(const Shape* shape) {
  try {
    return new Model(*shape);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void chorus_destroy(void* model) { delete static_cast<Model*>(model); }

// `parts` tensors of rows[i] x cols, raw file blocks, stacked into one matrix; panel by panel in turn when interleaved.
// which: 0 qkv, 1 o, 2 gate_up, 3 down, 4 head, 5 embedding. Rows of a part are a multiple of 16 if there are several.
int chorus_matrix(void* model, int layer, int which, int kind, int cols, int parts, const uint8_t* const* raw,
                  const int32_t* rows, int interleave) {
  Model& m = *static_cast<Model*>(model);
  int panels = 0;
  for (int i = 0; i < parts; i++) panels += (rows[i] + LANES - 1) / LANES;
  try {
    Matrix made = make_matrix(m.memory, Kind(kind), panels + panels % 2, cols);
    const size_t panel_bytes = LANES * (cols / BLOCK) * raw_block_bytes(Kind(kind));
    for (int i = 0, base = 0; i < parts; base += (rows[i++] + LANES - 1) / LANES)
      for (int p = 0; p * LANES < rows[i]; p++)
        pack_panel(made, interleave ? p * parts + i : base + p, raw[i] + p * panel_bytes, rows[i] - p * LANES);
    Layer& l = m.layers[layer];
    (which == 0 ? l.qkv : which == 1 ? l.o : which == 2 ? l.gate_up : which == 3 ? l.down
                : which == 4 ? m.head : m.embedding) = made;
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

void chorus_tie(void* model) { static_cast<Model*>(model)->embedding = static_cast<Model*>(model)->head; }

// which: 0 norm, 1 ffn_norm, 2 q_norm, 3 k_norm, 4 qkv_bias, 5 output norm
void chorus_vector(void* model, int layer, int which, const float* data, int64_t count) {
  Model& m = *static_cast<Model*>(model);
  Layer& l = m.layers[layer];
  (which == 0 ? l.norm : which == 1 ? l.ffn_norm : which == 2 ? l.q_norm : which == 3 ? l.k_norm
              : which == 4 ? l.qkv_bias : m.norm).assign(data, data + count);
}

int chorus_forward(void* model, const Step* step) {
  try {
    static_cast<Model*>(model)->forward(*step);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

}
