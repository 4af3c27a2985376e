// Mamba-1 (Gu & Dao 2023, arXiv:2312.00752): the selective scan, and its single step.
//
// State lies in slots, [D, N] contiguous within a slot, and is read and written in place. Arithmetic
// is fp32 whatever the dtype of values and state.
#include <omp.h>

#include <algorithm>
#include <cstddef>

#include "vec.h"

namespace {

// Arguments of both passes: 64 bits each, in the order of the array in selective_scan/cpu.py.
// Strides are in elements; the last axis of each tensor is contiguous.
struct Scan {
  int64_t dtype, dt_dtype, bc_dtype, state_dtype;
  const void *x, *dt, *B, *C, *z;  // z may be null
  const float *A, *D, *dt_bias;    // D may be null
  void *state, *y;
  const int64_t* slots;
  int64_t x_token, dt_token, b_token, b_group, c_token, c_group, z_token, slot_stride;
  int64_t channels, num_groups, state_size, num_rows;

  int64_t group_of(int64_t channel) const { return channel / (channels / num_groups); }
};

thread_local Scratch scan_scratch;

// ---- one token a row ----

// Sixteen channels (or the last `count`) of one row. A vector holds states of one channel.
template <typename ST>
void update_channels(const Scan& a, int64_t row, int64_t channel, int64_t count, const float* B,
                     const float* C) {
  alignas(64) float x[kLanes], dt[kLanes], skip[kLanes], z[kLanes];
  read_floats(a.dtype, a.x, row * a.x_token + channel, count, x);
  read_floats(a.dt_dtype, a.dt, row * a.dt_token + channel, count, dt);
  f32x16 step = softplus16(load(dt) + load_some(a.dt_bias + channel, count));
  store(dt, step);
  store(skip, step * load(x));
  ST* state = (ST*)a.state + a.slots[row] * a.slot_stride + channel * a.state_size;
  const float* A = a.A + channel * a.state_size;
  f32x16 sums[kLanes];
  for (int64_t i = 0; i < kLanes; i++) sums[i] = splat(0.0f);
  for (int64_t i = 0; i < count; i++) {
    for (int64_t n = 0; n < a.state_size; n += kLanes) {
      int64_t rest = a.state_size - n;
      f32x16 decay = exp16(load_some(A + i * a.state_size + n, rest) * dt[i]);
      f32x16 h = load_some(state + i * a.state_size + n, rest);
      h = h * decay + load(B + n) * skip[i];
      store_some(state + i * a.state_size + n, h, rest);
      sums[i] += h * load(C + n);
    }
  }
  f32x16 y = sum_rows(sums);
  if (a.D) y += load(x) * load_some(a.D + channel, count);
  if (a.z) {
    read_floats(a.dtype, a.z, row * a.z_token + channel, count, z);
    y *= silu(load(z));
  }
  store(x, y);
  write_floats(a.dtype, a.y, row * a.channels + channel, count, x);
}

template <typename ST>
void update(const Scan& a) {
  int64_t per_group = a.channels / a.num_groups, width = round_up(a.state_size, kLanes);
  int64_t runs = (per_group + kLanes - 1) / kLanes, tasks = a.num_rows * a.num_groups;
  // A task is a run of channels of one group: long ones where rows are many.
  int64_t parts = std::min<int64_t>(runs, std::max<int64_t>(1, 32 / std::max<int64_t>(1, tasks)));
  int64_t per_part = (runs + parts - 1) / parts;
  bool is_large = a.num_rows * a.channels * a.state_size > 16384;
#pragma omp parallel for schedule(dynamic) if (is_large)
  for (int64_t task = 0; task < tasks * parts; task++) {
    int64_t row = task / (a.num_groups * parts), group = task / parts % a.num_groups;
    float* B = (float*)scan_scratch.reserve(2 * width * sizeof(float));
    float* C = B + width;
    read_floats(a.bc_dtype, a.B, row * a.b_token + group * a.b_group, a.state_size, B);
    read_floats(a.bc_dtype, a.C, row * a.c_token + group * a.c_group, a.state_size, C);
    int64_t first = task % parts * per_part, last = std::min(first + per_part, runs);
    for (int64_t run = first; run < last; run++) {
      int64_t offset = run * kLanes, count = std::min(kLanes, per_group - offset);
      update_channels<ST>(a, row, group * per_group + offset, count, B, C);
    }
  }
}

// ---- scan ----

constexpr int64_t kBlock = 4 * kLanes;  // channels of one task: a line of memory in 16 bits

// Up to kBlock channels of one sequence. A vector holds one state of sixteen channels.
void scan_block(const Scan& a, int64_t row, int64_t first, int64_t last, int64_t channel,
                int64_t count, bool has_state, float* scratch) {
  int64_t size = a.state_size, width = round_up(size, kLanes), padded = round_up(count, kLanes);
  float* A = scratch;              // [N, kBlock]
  float* h = A + size * kBlock;    // [N, kBlock]
  float* B = h + size * kBlock;    // [width]
  float* C = B + width;            // [width]
  float* line = C + width;         // [width]
  float* x = line + width;         // [kBlock] each from here on
  float *dt = x + kBlock, *z = dt + kBlock, *y = z + kBlock, *skip = y + kBlock;
  float* bias = skip + kBlock;
  std::memset(A, 0, 2 * size * kBlock * sizeof(float));
  std::memset(skip, 0, 2 * kBlock * sizeof(float));
  int64_t state = a.slots[row] * a.slot_stride + channel * size, group = a.group_of(channel);
  for (int64_t i = 0; i < count; i++) {
    for (int64_t n = 0; n < size; n++) A[n * kBlock + i] = a.A[(channel + i) * size + n];
    if (a.D) skip[i] = a.D[channel + i];
    bias[i] = a.dt_bias[channel + i];
    if (!has_state) continue;
    read_floats(a.state_dtype, a.state, state + i * size, size, line);
    for (int64_t n = 0; n < size; n++) h[n * kBlock + i] = line[n];
  }
  for (int64_t t = first; t < last; t++) {
    read_floats(a.dtype, a.x, t * a.x_token + channel, count, x);
    read_floats(a.dt_dtype, a.dt, t * a.dt_token + channel, count, dt);
    read_floats(a.bc_dtype, a.B, t * a.b_token + group * a.b_group, size, B);
    read_floats(a.bc_dtype, a.C, t * a.c_token + group * a.c_group, size, C);
    if (a.z) read_floats(a.dtype, a.z, t * a.z_token + channel, count, z);
    for (int64_t i = 0; i < padded; i += kLanes) {
      f32x16 step = softplus16(load(dt + i) + load(bias + i));
      f32x16 value = load(x + i), added = step * value, sum = value * load(skip + i);
      for (int64_t n = 0; n < size; n++) {
        f32x16 decay = exp16(step * load(A + n * kBlock + i));
        f32x16 held = load(h + n * kBlock + i) * decay + added * B[n];
        store(h + n * kBlock + i, held);
        sum += held * C[n];
      }
      store(y + i, a.z ? sum * silu(load(z + i)) : sum);
    }
    write_floats(a.dtype, a.y, t * a.channels + channel, count, y);
  }
  for (int64_t i = 0; i < count; i++) {
    for (int64_t n = 0; n < size; n++) line[n] = h[n * kBlock + i];
    write_floats(a.state_dtype, a.state, state + i * size, size, line);
  }
}

void scan(const Scan& a, const int32_t* query_start, const bool* has_state) {
  int64_t per_group = a.channels / a.num_groups;
  int64_t blocks = (per_group + kBlock - 1) / kBlock;
  int64_t floats = 2 * a.state_size * kBlock + 3 * round_up(a.state_size, kLanes) + 6 * kBlock;
  int64_t tasks = a.num_rows * a.num_groups * blocks;
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < tasks; task++) {
    int64_t row = task / (a.num_groups * blocks), group = task / blocks % a.num_groups;
    int64_t offset = task % blocks * kBlock, count = std::min(kBlock, per_group - offset);
    int64_t first = query_start[row], last = query_start[row + 1];
    if (first == last) continue;
    float* scratch = (float*)scan_scratch.reserve(floats * sizeof(float));
    scan_block(a, row, first, last, group * per_group + offset, count, has_state[row], scratch);
  }
}

}  // namespace

// One token a row.
TANDEM_API void tandem_selective_scan_update(const int64_t* fields) {
  Scan a;
  std::memcpy((void*)&a, fields, sizeof(Scan));
  with_dtype(a.state_dtype, [&](auto held) { update<decltype(held)>(a); });
}

// Packed sequences: row i holds the tokens from query_start[i] to query_start[i + 1].
TANDEM_API void tandem_selective_scan_prefill(const int64_t* fields, const int32_t* query_start,
                                              const bool* has_state) {
  Scan a;
  std::memcpy((void*)&a, fields, sizeof(Scan));
  scan(a, query_start, has_state);
}
