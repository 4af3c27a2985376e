// Depthwise causal convolution over packed sequences; each sequence's window, its last W - 1 raw
// inputs, oldest first, lies in a slot and is updated in place.
//
// The channels of x are covered in order by up to kMaxWindows windows, [C_i, W - 1] contiguous
// within a slot. Values and windows have one dtype.
#include <omp.h>

#include <algorithm>

#include "vec.h"

namespace {

constexpr int64_t kMaxWindows = 8;
constexpr int64_t kMaxTaps = 8;
constexpr int64_t kBlock = 128;  // channels that one task takes over a whole sequence

struct Windows {
  void* const* base;            // first byte of each window in slot 0
  const int64_t* slot_strides;  // elements from slot to slot
  const int64_t* channels;      // channels of each
  int64_t count;
};

// What a task needs of the convolution, per block of up to kBlock channels, tap after tap.
struct Taps {
  alignas(64) float weight[kMaxTaps][kBlock];
  alignas(64) float bias[kBlock];
};

void read_taps(int64_t dtype, const void* weight, const void* bias, int64_t channel, int64_t count,
               int64_t num_taps, Taps& taps) {
  for (int64_t c = 0; c < count; c++) {
    for (int64_t w = 0; w < num_taps; w++)
      taps.weight[w][c] = load_scalar(weight, dtype, (channel + c) * num_taps + w);
    taps.bias[c] = bias ? load_scalar(bias, dtype, channel + c) : 0.0f;
  }
}

// One block of channels within one window of one sequence. The last W - 1 inputs stay in
// `recent`, one row a tap.
template <typename T>
void convolve(const T* x, int64_t x_stride, T* y, int64_t y_stride, const Taps& taps, T* window,
              int64_t num_tokens, int64_t count, int64_t num_taps, bool has_state, bool is_silu) {
  alignas(64) float recent[kMaxTaps][kBlock];
  int64_t history = num_taps - 1;
  for (int64_t w = 0; w < history; w++)
    for (int64_t c = 0; c < count; c++)
      recent[w][c] = has_state ? to_float(window[c * history + w]) : 0.0f;
  int64_t oldest = 0;  // row of `recent` that holds the oldest input
  for (int64_t t = 0; t < num_tokens; t++) {
    // Slot `history` of the ring takes the new input, so that all W inputs stand in it at once.
    int64_t newest = (oldest + history) % num_taps;
    int64_t rows[kMaxTaps];
    for (int64_t w = 0; w < num_taps; w++) rows[w] = (oldest + w) % num_taps;
    for (int64_t c = 0; c < count; c += kLanes) {
      f32x16 value = load_some(x + t * x_stride + c, count - c);
      store(recent[newest] + c, value);
      f32x16 total = load(taps.bias + c);
      for (int64_t w = 0; w < history; w++)
        total += load(recent[rows[w]] + c) * load(taps.weight[w] + c);
      total += value * load(taps.weight[history] + c);
      store_some(y + t * y_stride + c, is_silu ? silu(total) : total, count - c);
    }
    oldest = (oldest + 1) % num_taps;
  }
  for (int64_t w = 0; w < history; w++)
    for (int64_t c = 0; c < count; c++)
      from_float(recent[(oldest + w) % num_taps][c], window + c * history + w);
}

// Calls `task(row, window, first channel of x, first channel in the window, count)` for each block.
template <typename F>
void for_each_block(const Windows& windows, int64_t num_rows, bool is_large, F&& task) {
  int64_t blocks_before[kMaxWindows + 1] = {0}, channels_before[kMaxWindows + 1] = {0};
  for (int64_t i = 0; i < windows.count; i++) {
    blocks_before[i + 1] = blocks_before[i] + (windows.channels[i] + kBlock - 1) / kBlock;
    channels_before[i + 1] = channels_before[i] + windows.channels[i];
  }
  int64_t blocks = blocks_before[windows.count];
#pragma omp parallel for schedule(dynamic) collapse(2) if (is_large)
  for (int64_t block = 0; block < blocks; block++) {
    for (int64_t row = 0; row < num_rows; row++) {
      int64_t i = 0;
      while (block >= blocks_before[i + 1]) i++;
      int64_t inside = (block - blocks_before[i]) * kBlock;
      task(row, i, channels_before[i] + inside, inside,
           std::min(kBlock, windows.channels[i] - inside));
    }
  }
}

}  // namespace

// Rows are tokens query_start[row] to query_start[row + 1] of x; without query_start one token
// each. Without has_state every window is live. y is contiguous.
TANDEM_API void tandem_conv1d(int64_t dtype, int64_t weight_dtype, const void* x,
                              int64_t x_stride, const void* weight, const void* bias, void* y,
                              void* const* window_base,
                              const int64_t* slot_strides, const int64_t* channels,
                              int64_t num_windows, const int64_t* slots,
                              const int32_t* query_start, const bool* has_state, int64_t num_rows,
                              int64_t num_channels, int64_t num_taps, int64_t is_silu) {
  Windows windows{window_base, slot_strides, channels, num_windows};
  int64_t num_tokens = query_start ? query_start[num_rows] : num_rows;
  with_dtype(dtype, [&](auto value) {
    using T = decltype(value);
    for_each_block(windows, num_rows, num_tokens * num_channels > 8192,
                   [&](int64_t row, int64_t i, int64_t channel, int64_t inside, int64_t count) {
      int64_t first = query_start ? query_start[row] : row;
      int64_t last = query_start ? query_start[row + 1] : row + 1;
      if (first == last) return;
      Taps taps;
      read_taps(weight_dtype, weight, bias, channel, count, num_taps, taps);
      T* window = (T*)windows.base[i] + slots[row] * windows.slot_strides[i] +
                  inside * (num_taps - 1);
      convolve((const T*)x + first * x_stride + channel, x_stride,
               (T*)y + first * num_channels + channel, num_channels, taps, window, last - first,
               count, num_taps, has_state ? has_state[row] : true, is_silu);
    });
  });
}
