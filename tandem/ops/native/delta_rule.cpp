// The delta rule with decay (Yang et al. 2024, arXiv:2412.06464; by channel: Kimi Team 2025,
// arXiv:2510.26692), token by token: S = S diag(decay), S += beta (v - S k) k^T, o = S q.
//
// State lies in slots, [H, V, K] contiguous within a slot, and is read and written in place. Each
// row of it moves on its own, so a few rows stay in the first cache for all tokens of a sequence:
// that is faster here than the products of a chunked form. Arithmetic is fp32.
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "vec.h"

namespace {

// Arguments of both passes, 64 bits each, in the order of the array in delta_rule/cpu.py. Strides
// are in elements; the last axis of each tensor is contiguous.
struct Delta {
  int64_t dtype, state_dtype, a_dtype, b_dtype;
  const void *q, *k, *v, *a, *b;
  const float *A, *dt_bias;
  void *state, *o;
  const int64_t* slots;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, a_token, a_head, b_token, slot_stride;
  int64_t num_heads, num_groups, key_dim, value_dim, num_rows;
  int64_t by_channel, has_floor;
  double max_beta, decay_floor;

  explicit Delta(const int64_t* fields) { std::memcpy((void*)this, fields, sizeof(Delta)); }

  int64_t state_offset(int64_t row, int64_t head) const {
    return slots[row] * slot_stride + head * value_dim * key_dim;
  }
};

thread_local Scratch update_scratch;
thread_local Scratch scan_scratch;

float dot(const float* x, const float* y, int64_t count) {
  f32x16 total = splat(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) total += load(x + i) * load(y + i);
  return sum(total);
}

// Brings the padded x to length `length`.
void scale_to(float* x, int64_t count, float length) {
  float factor = length / sqrtf(dot(x, x, count) + 1e-6f);
  for (int64_t i = 0; i < count; i += kLanes) store(x + i, load(x + i) * factor);
}

// exp(g) for raw values to which the bias is added.
INLINE f32x16 decay_of(const Delta& d, f32x16 raw, float rate) {
  f32x16 g = d.has_floor ? (float)d.decay_floor / (1.0f + exp16(raw * rate))
                         : softplus16(raw) * rate;
  return exp16(g);
}

// What one token of one head brings: q and k at their lengths, the decay of each channel (or of
// all), beta. The vectors are padded with zeros, the decay with anything.
float read_token(const Delta& d, int64_t token, int64_t head, float* q, float* k, float* decay) {
  int64_t group = head / (d.num_heads / d.num_groups), width = round_up(d.key_dim, kLanes);
  read_floats(d.dtype, d.q, token * d.q_token + group * d.q_head, d.key_dim, q);
  read_floats(d.dtype, d.k, token * d.k_token + group * d.k_head, d.key_dim, k);
  scale_to(q, width, 1.0f / sqrtf((float)d.key_dim));
  scale_to(k, width, 1.0f);
  float rate = d.A[head];
  if (d.by_channel) {
    read_floats(d.a_dtype, d.a, token * d.a_token + head * d.a_head, d.key_dim, decay);
    const float* bias = d.dt_bias + head * d.key_dim;
    for (int64_t i = 0; i < d.key_dim; i += kLanes)
      store(decay + i, decay_of(d, load(decay + i) + load_some(bias + i, d.key_dim - i), rate));
  } else {
    float raw = load_scalar(d.a, d.a_dtype, token * d.a_token + head) + d.dt_bias[head];
    f32x16 same = decay_of(d, splat(raw), rate);
    for (int64_t i = 0; i < width; i += kLanes) store(decay + i, same);
  }
  float raw = load_scalar(d.b, d.b_dtype, token * d.b_token + head);
  return (float)d.max_beta / (1.0f + expf(-raw));
}

// ---- one token a row ----

// One row of the state in two passes, the second of them in the first cache.
template <typename ST>
INLINE float update_row(ST* state, int64_t key_dim, const float* kept_q, const float* kept_k,
                        const float* k, const float* decay, float v, float beta, float overlap) {
  f32x16 found = splat(0.0f), read = splat(0.0f);
  for (int64_t i = 0; i < key_dim; i += kLanes) {
    f32x16 s = load_some(state + i, key_dim - i);
    found += s * load(kept_k + i);
    read += s * load(kept_q + i);
  }
  float written = beta * (v - sum(found));
  for (int64_t i = 0; i < key_dim; i += kLanes) {
    f32x16 s = load_some(state + i, key_dim - i) * load(decay + i) + load(k + i) * written;
    store_some(state + i, s, key_dim - i);
  }
  return sum(read) + written * overlap;
}

template <typename ST>
void update_head(const Delta& d, int64_t row, int64_t head, float* scratch) {
  int64_t width = round_up(d.key_dim, kLanes);
  float *q = scratch, *k = q + width, *decay = k + width, *kept_q = decay + width;
  float *kept_k = kept_q + width, *v = kept_k + width;
  float* o = v + round_up(d.value_dim, kLanes);
  float beta = read_token(d, row, head, q, k, decay);
  read_floats(d.dtype, d.v, row * d.v_token + head * d.v_head, d.value_dim, v);
  float overlap = dot(q, k, width);
  for (int64_t i = 0; i < width; i += kLanes) {
    store(kept_q + i, load(q + i) * load(decay + i));
    store(kept_k + i, load(k + i) * load(decay + i));
  }
  ST* state = (ST*)d.state + d.state_offset(row, head);
  for (int64_t i = 0; i < d.value_dim; i++)
    o[i] = update_row(state + i * d.key_dim, d.key_dim, kept_q, kept_k, k, decay, v[i], beta,
                      overlap);
  write_floats(d.dtype, d.o, (row * d.num_heads + head) * d.value_dim, d.value_dim, o);
}

template <typename ST>
void update(const Delta& d) {
  int64_t tasks = d.num_rows * d.num_heads;
  int64_t floats = 5 * round_up(d.key_dim, kLanes) + 2 * round_up(d.value_dim, kLanes);
  bool is_large = tasks * d.value_dim * d.key_dim > 16384;
#pragma omp parallel if (is_large)
  {
    float* scratch = (float*)update_scratch.reserve(floats * sizeof(float));
    int64_t run = std::max<int64_t>(1, tasks / (omp_get_num_threads() * 8));
#pragma omp for schedule(dynamic, run) nowait
    for (int64_t task = 0; task < tasks; task++)
      update_head<ST>(d, task / d.num_heads, task % d.num_heads, scratch);
  }
}

// ---- scan ----

constexpr int64_t kTokens = 32;  // read at a time; all rows of the state pass over them

// Sixteen rows of the state, [K, 16]: a vector holds one key channel of all of them. Four sums run
// side by side, as one alone would wait for itself.
void scan_rows(float* s, int64_t key_dim, const float* q, const float* k, const float* decay,
               const float* beta, int64_t width, const float* v, float* o, int64_t rows_width,
               int64_t count) {
  for (int64_t t = 0; t < count; t++, q += width, k += width, decay += width) {
    f32x16 found[4] = {}, read[4] = {};
    int64_t whole = key_dim / 4 * 4;
    auto meet = [&](int64_t i, int lane) __attribute__((always_inline)) {
      f32x16 kept = load(s + i * kLanes) * decay[i];
      store(s + i * kLanes, kept);
      found[lane] += kept * k[i];
    };
    for (int64_t i = 0; i < whole; i += 4) {
      meet(i, 0);
      meet(i + 1, 1);
      meet(i + 2, 2);
      meet(i + 3, 3);
    }
    for (int64_t i = whole; i < key_dim; i++) meet(i, 0);
    f32x16 all = (found[0] + found[1]) + (found[2] + found[3]);
    f32x16 written = (load(v + t * rows_width) - all) * beta[t];
    auto write = [&](int64_t i, int lane) __attribute__((always_inline)) {
      f32x16 now = load(s + i * kLanes) + written * k[i];
      store(s + i * kLanes, now);
      read[lane] += now * q[i];
    };
    for (int64_t i = 0; i < whole; i += 4) {
      write(i, 0);
      write(i + 1, 1);
      write(i + 2, 2);
      write(i + 3, 3);
    }
    for (int64_t i = whole; i < key_dim; i++) write(i, 0);
    store(o + t * rows_width, (read[0] + read[1]) + (read[2] + read[3]));
  }
}

// One head of one sequence: tokens [first, last).
void scan_head(const Delta& d, int64_t row, int64_t first, int64_t last, int64_t head,
               bool has_state, float* scratch) {
  int64_t width = round_up(d.key_dim, kLanes), rows_width = round_up(d.value_dim, kLanes);
  float* s = scratch;  // [V / 16, K, 16], the rows behind the last of them zero
  float *q = s + rows_width * d.key_dim, *k = q + kTokens * width, *decay = k + kTokens * width;
  float *v = decay + kTokens * width, *o = v + kTokens * rows_width;
  float *beta = o + kTokens * rows_width, *line = beta + kTokens;
  int64_t at = d.state_offset(row, head);
  std::memset(s, 0, rows_width * d.key_dim * sizeof(float));
  for (int64_t r = 0; r < (has_state ? d.value_dim : 0); r++) {
    read_floats(d.state_dtype, d.state, at + r * d.key_dim, d.key_dim, line);
    float* to = s + r / kLanes * kLanes * d.key_dim + r % kLanes;
    for (int64_t i = 0; i < d.key_dim; i++) to[i * kLanes] = line[i];
  }
  for (; first < last; first += kTokens) {
    int64_t count = std::min(kTokens, last - first);
    for (int64_t t = 0; t < count; t++) {
      beta[t] = read_token(d, first + t, head, q + t * width, k + t * width, decay + t * width);
      int64_t from = (first + t) * d.v_token + head * d.v_head;
      read_floats(d.dtype, d.v, from, d.value_dim, v + t * rows_width);
    }
    for (int64_t r = 0; r < rows_width; r += kLanes)
      scan_rows(s + r * d.key_dim, d.key_dim, q, k, decay, beta, width, v + r, o + r, rows_width,
                count);
    for (int64_t t = 0; t < count; t++) {
      int64_t to = ((first + t) * d.num_heads + head) * d.value_dim;
      write_floats(d.dtype, d.o, to, d.value_dim, o + t * rows_width);
    }
  }
  for (int64_t r = 0; r < d.value_dim; r++) {
    const float* from = s + r / kLanes * kLanes * d.key_dim + r % kLanes;
    for (int64_t i = 0; i < d.key_dim; i++) line[i] = from[i * kLanes];
    write_floats(d.state_dtype, d.state, at + r * d.key_dim, d.key_dim, line);
  }
}

void scan(const Delta& d, const int32_t* query_start, const bool* has_state) {
  int64_t width = round_up(d.key_dim, kLanes), rows_width = round_up(d.value_dim, kLanes);
  int64_t floats = rows_width * d.key_dim + kTokens * (3 * width + 2 * rows_width + 1) + width;
  int64_t work = query_start[d.num_rows] * d.num_heads * d.value_dim * d.key_dim;
#pragma omp parallel if (work > 65536)
  {
    float* scratch = (float*)scan_scratch.reserve(floats * sizeof(float));
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t row = 0; row < d.num_rows; row++)
      for (int64_t head = 0; head < d.num_heads; head++)
        if (query_start[row] < query_start[row + 1])
          scan_head(d, row, query_start[row], query_start[row + 1], head, has_state[row], scratch);
  }
}

}  // namespace

// One token a row.
TANDEM_API void tandem_delta_update(const int64_t* fields) {
  Delta d(fields);
  with_dtype(d.state_dtype, [&](auto held) { update<decltype(held)>(d); });
}

// Packed sequences: row i holds the tokens from query_start[i] to query_start[i + 1].
TANDEM_API void tandem_delta_prefill(const int64_t* fields, const int32_t* query_start,
                                     const bool* has_state) {
  scan(Delta(fields), query_start, has_state);
}
