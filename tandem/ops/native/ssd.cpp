// Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): the recurrence of one token, and the chunked scan.
//
// State lies in slots, [H, P, N] contiguous within a slot, and is read and written in place.
// Arithmetic is fp32, running sums of decay fp64, whatever the dtype of values and state.
#include <omp.h>

#include <algorithm>
#include <cstddef>

#include "gemm.h"
#include "vec.h"

namespace {

// Arguments of both passes: 64 bits each, in the order of the array in ssd/cpu.py, then the limits.
// Strides are in elements; the last axis of each tensor is contiguous.
struct Ssd {
  int64_t dtype, state_dtype, dt_dtype;
  const void *x, *dt, *B, *C;
  const float *A, *D, *dt_bias;  // D may be null
  void *state, *y;
  const int64_t* slots;
  int64_t x_token, x_head, dt_token, b_token, b_group, c_token, c_group, slot_stride;
  int64_t num_heads, num_groups, head_dim, state_size, num_rows;
  float dt_min, dt_max;

  Ssd(const int64_t* fields, float dt_min, float dt_max) {
    std::memcpy((void*)this, fields, offsetof(Ssd, dt_min));
    this->dt_min = dt_min;
    this->dt_max = dt_max;
  }

  int64_t group_of(int64_t head) const { return head / (num_heads / num_groups); }

  float step(int64_t token, int64_t head) const {
    float raw = load_scalar(dt, dt_dtype, token * dt_token + head) + dt_bias[head];
    float value = softplus(raw);
    // Written so that NaN passes, as it does through a clamp.
    value = value < dt_min ? dt_min : value;
    return value > dt_max ? dt_max : value;
  }

  int64_t state_offset(int64_t row, int64_t head) const {
    return slots[row] * slot_stride + head * head_dim * state_size;
  }
};

thread_local Scratch update_scratch;
thread_local Scratch shared_scratch;
thread_local Scratch head_scratch;

// One row of a head's state: h = decay h + scaled B, returns h C. B and C are padded with zeros to
// whole vectors. Row after row is one stream through memory, which the hardware fetches ahead;
// several rows at a time halved its speed.
template <typename ST>
INLINE float update_row(ST* state, int64_t state_size, const float* B, const float* C,
                        float scaled, float decay) {
  f32x16 acc = splat(0.0f);
  int64_t whole = state_size / kLanes * kLanes, rest = state_size - whole;
  for (int64_t n = 0; n < whole; n += kLanes) {
    f32x16 h = load(state + n) * decay + load(B + n) * scaled;
    store(state + n, h);
    acc += h * load(C + n);
  }
  if (rest) {
    f32x16 h = load_some(state + whole, rest) * decay + load(B + whole) * scaled;
    store_some(state + whole, h, rest);
    acc += h * load(C + whole);
  }
  return sum(acc);
}

template <typename ST>
void update_head(const Ssd& a, int64_t row, int64_t head, float* scratch) {
  int64_t width = round_up(a.state_size, kLanes), rows = round_up(a.head_dim, kLanes);
  float *B = scratch, *C = B + width, *x = C + width, *scaled = x + rows, *y = scaled + rows;
  int64_t group = a.group_of(head);
  read_floats(a.dtype, a.B, row * a.b_token + group * a.b_group, a.state_size, B);
  read_floats(a.dtype, a.C, row * a.c_token + group * a.c_group, a.state_size, C);
  read_floats(a.dtype, a.x, row * a.x_token + head * a.x_head, a.head_dim, x);
  float step = a.step(row, head), decay = expf(step * a.A[head]);
  for (int64_t p = 0; p < rows; p++) scaled[p] = x[p] * step;
  ST* state = (ST*)a.state + a.state_offset(row, head);
  for (int64_t p = 0; p < a.head_dim; p++)
    y[p] = update_row(state + p * a.state_size, a.state_size, B, C, scaled[p], decay);
  if (a.D)
    for (int64_t p = 0; p < a.head_dim; p++) y[p] += x[p] * a.D[head];
  write_floats(a.dtype, a.y, (row * a.num_heads + head) * a.head_dim, a.head_dim, y);
}

template <typename ST>
void update(const Ssd& a) {
  int64_t tasks = a.num_rows * a.num_heads;
  int64_t nbytes = (2 * round_up(a.state_size, kLanes) + 3 * round_up(a.head_dim, kLanes)) * 4;
  bool is_large = tasks * a.head_dim * a.state_size > 16384;
#pragma omp parallel if (is_large)
  {
    float* scratch = (float*)update_scratch.reserve(nbytes);
    int64_t run = std::max<int64_t>(1, tasks / (omp_get_num_threads() * 8));
#pragma omp for schedule(dynamic, run) nowait
    for (int64_t task = 0; task < tasks; task++)
      update_head<ST>(a, task / a.num_heads, task % a.num_heads, scratch);
  }
}

// ---- scan ----

constexpr int64_t kHeadBlock = 64;  // columns of x that one pass over a head takes: four vectors

// What all heads of a group share, for all tokens: B and C in fp32, and C B^T within each chunk.
struct Shared {
  float *B, *C;   // [T, G, width]
  float* scores;  // [T, G, chunk]: row t holds the products with the tokens of its chunk
  int64_t width, chunk;
};

void share_chunk(const Ssd& a, const Shared& s, int64_t group, int64_t first, int64_t count,
                 float* transposed) {
  int64_t row_stride = a.num_groups * s.width;
  float* B = s.B + first * row_stride + group * s.width;
  float* C = s.C + first * row_stride + group * s.width;
  for (int64_t t = 0; t < count; t++) {
    int64_t b = (first + t) * a.b_token + group * a.b_group;
    int64_t c = (first + t) * a.c_token + group * a.c_group;
    read_floats(a.dtype, a.B, b, a.state_size, B + t * row_stride);
    read_floats(a.dtype, a.C, c, a.state_size, C + t * row_stride);
  }
  for (int64_t n = 0; n < a.state_size; n++)
    for (int64_t t = 0; t < s.chunk; t++)
      transposed[n * s.chunk + t] = t < count ? B[t * row_stride + n] : 0.0f;
  float* scores = s.scores + (first * a.num_groups + group) * s.chunk;
  int64_t score_stride = a.num_groups * s.chunk;
  for (int64_t t = 0; t < count; t += kTileRows) {
    int64_t rows = std::min(kTileRows, count - t);
    // Only up to the last token that these rows see.
    for (int64_t j = 0; j < t + rows;) {
      int64_t columns = s.chunk - j >= 64 ? 64 : s.chunk - j >= 32 ? 32 : 16;
      with_tile(rows, columns, [&](auto tile) __attribute__((always_inline)) {
        tile.clear();
        tile.add(C + t * row_stride, row_stride, 1, transposed + j, s.chunk, a.state_size);
        tile.to(scores + t * score_stride + j, score_stride);
      });
      j += columns;
    }
  }
}

// One head (or 64 of its columns) of one sequence, chunk after chunk.
void scan_head(const Ssd& a, const Shared& s, int64_t row, int64_t first, int64_t last,
               int64_t head, int64_t column, bool has_state, float* scratch) {
  int64_t dim = std::min(kHeadBlock, a.head_dim - column);
  int64_t width = tile_columns(dim), chunk = s.chunk;
  int64_t group = a.group_of(head), row_stride = a.num_groups * s.width;
  int64_t score_stride = a.num_groups * chunk;
  float* h = scratch;                    // state, transposed: [N, width]
  float* x = h + a.state_size * width;   // [chunk, width]
  float* weighted = x + chunk * width;   // x, weighted by its decay to the end of the chunk
  float* mixed = weighted + chunk * width;  // [kTileRows, chunk] scores with decay
  float* out = mixed + kTileRows * chunk;   // [kTileRows, width]
  float* step = out + kTileRows * width;
  float* from_start = step + chunk;
  double* total = (double*)(from_start + chunk);  // running sum of log decay
  float* line = (float*)(total + chunk);          // one row of the state

  int64_t state = a.state_offset(row, head) + column * a.state_size;
  std::memset(h, 0, a.state_size * width * sizeof(float));
  std::memset(x, 0, 2 * chunk * width * sizeof(float));  // the padding of x and `weighted`
  if (has_state) {
    for (int64_t p = 0; p < dim; p++) {
      read_floats(a.state_dtype, a.state, state + p * a.state_size, a.state_size, line);
      for (int64_t n = 0; n < a.state_size; n++) h[n * width + p] = line[n];
    }
  }

  for (; first < last; first += chunk) {
    int64_t count = std::min(chunk, last - first), padded = round_up(count, kLanes);
    double sum_of_logs = 0.0;
    for (int64_t t = 0; t < padded; t++) {
      step[t] = t < count ? a.step(first + t, head) : 0.0f;
      sum_of_logs += (double)(step[t] * a.A[head]);
      total[t] = sum_of_logs;
    }
    for (int64_t t = 0; t < padded; t += kLanes) {
      float logs[kLanes], to_end[kLanes];
      for (int i = 0; i < kLanes; i++) {
        logs[i] = (float)total[t + i];
        to_end[i] = (float)(sum_of_logs - total[t + i]);
      }
      store(from_start + t, exp16(load(logs)));
      store(to_end, exp16(load(to_end)) * load(step + t));
      for (int64_t i = t; i < std::min(count, t + kLanes); i++) {
        int64_t from = (first + i) * a.x_token + head * a.x_head + column;
        read_floats(a.dtype, a.x, from, dim, x + i * width);
        for (int64_t p = 0; p < width; p++) weighted[i * width + p] = x[i * width + p] * to_end[i - t];
      }
    }

    // y[t] = from_start[t] C[t] h + sum_s scores[t, s] decay(s..t) step[s] x[s] + D x[t]
    const float* C = s.C + first * row_stride + group * s.width;
    const float* B = s.B + first * row_stride + group * s.width;
    const float* scores = s.scores + (first * a.num_groups + group) * chunk;
    for (int64_t t = 0; t < count; t += kTileRows) {
      int64_t rows = std::min(kTileRows, count - t), seen = t + rows;
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < seen; j += kLanes) {
          float logs[kLanes];
          for (int i = 0; i < kLanes; i++) logs[i] = (float)(total[t + r] - total[j + i]);
          f32x16 decay = exp16(load(logs));
          store(mixed + r * chunk + j,
                load(scores + (t + r) * score_stride + j) * decay * load(step + j));
        }
        // The future: its decay is above one and may be infinite, so it is cut, not multiplied.
        for (int64_t j = t + r + 1; j < seen; j++) mixed[r * chunk + j] = 0.0f;
      }
      with_tile(rows, width, [&](auto tile) __attribute__((always_inline)) {
        tile.clear();
        tile.add(C + t * row_stride, row_stride, 1, h, width, a.state_size);
        tile.scale(from_start + t);
        tile.add(mixed, chunk, 1, x, width, seen);
        if (a.D) tile.add_scaled(x + t * width, width, a.D[head]);
        tile.to(out, width);
      });
      for (int64_t r = 0; r < rows; r++) {
        int64_t to = ((first + t + r) * a.num_heads + head) * a.head_dim + column;
        write_floats(a.dtype, a.y, to, dim, out + r * width);
      }
    }

    // h = decay of the chunk * h + B^T weighted
    float decay = from_start[count - 1];
    for (int64_t n = 0; n < a.state_size; n += kTileRows) {
      int64_t rows = std::min(kTileRows, a.state_size - n);
      with_tile(rows, width, [&](auto tile) __attribute__((always_inline)) {
        tile.from_scaled(h + n * width, width, decay);
        tile.add(B + n, 1, row_stride, weighted, width, count);
        tile.to(h + n * width, width);
      });
    }
  }
  for (int64_t p = 0; p < dim; p++) {
    for (int64_t n = 0; n < a.state_size; n++) line[n] = h[n * width + p];
    write_floats(a.state_dtype, a.state, state + p * a.state_size, a.state_size, line);
  }
}

void scan(const Ssd& a, const int32_t* query_start, const bool* has_state, int64_t chunk) {
  int64_t num_rows = a.num_rows;
  int64_t num_tokens = query_start[num_rows];
  if (num_tokens == 0) return;
  chunk = round_up(chunk, kLanes);
  Shared s;
  s.width = round_up(a.state_size, kLanes);
  s.chunk = chunk;
  int64_t values = num_tokens * a.num_groups * s.width;
  s.B = (float*)shared_scratch.reserve(
      (2 * values + num_tokens * a.num_groups * chunk) * sizeof(float));
  s.C = s.B + values;
  s.scores = s.C + values;
  int64_t blocks = (a.head_dim + kHeadBlock - 1) / kHeadBlock;
  int64_t head_floats = (a.state_size + 2 * chunk + kTileRows) * kHeadBlock +
                        (kTileRows + 4) * chunk + s.width;
  int64_t floats = std::max(head_floats, a.state_size * chunk);

#pragma omp parallel
  {
    float* scratch = (float*)head_scratch.reserve(floats * sizeof(float));
    for (int64_t row = 0; row < num_rows; row++) {
      int64_t chunks = (query_start[row + 1] - query_start[row] + chunk - 1) / chunk;
#pragma omp for schedule(dynamic) nowait
      for (int64_t task = 0; task < chunks * a.num_groups; task++) {
        int64_t first = query_start[row] + task / a.num_groups * chunk;
        int64_t count = std::min<int64_t>(chunk, query_start[row + 1] - first);
        share_chunk(a, s, task % a.num_groups, first, count, scratch);
      }
    }
#pragma omp barrier
#pragma omp for schedule(dynamic) collapse(3)
    for (int64_t row = 0; row < num_rows; row++)
      for (int64_t head = 0; head < a.num_heads; head++)
        for (int64_t block = 0; block < blocks; block++)
          if (query_start[row] < query_start[row + 1])
            scan_head(a, s, row, query_start[row], query_start[row + 1], head,
                             block * kHeadBlock, has_state[row], scratch);
  }
}

}  // namespace

// One token a row.
TANDEM_API void tandem_ssd_update(const int64_t* fields, float dt_min, float dt_max) {
  Ssd a(fields, dt_min, dt_max);
  with_dtype(a.state_dtype, [&](auto held) { update<decltype(held)>(a); });
}

// Packed sequences: row i holds the tokens from query_start[i] to query_start[i + 1].
TANDEM_API void tandem_ssd_prefill(const int64_t* fields, float dt_min, float dt_max,
                                   const int32_t* query_start, const bool* has_state,
                                   int64_t chunk) {
  scan(Ssd(fields, dt_min, dt_max), query_start, has_state, chunk);
}
