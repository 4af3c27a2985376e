// Linear layers over bf16 weights that were packed once for the dot-product instruction.
//
// Packed weights: [panel][k / 2][32 outputs][2], zero padded, so that one panel is one stream and
// a vector holds two inputs of sixteen outputs. Activations are packed likewise: [tile][k / 2]
// [rows of the tile][2]. Each output is one fp32 sum in the order of k whatever the number of
// rows, so a row does not depend, not even by rounding, on what it is batched with.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include "vec.h"

namespace {

constexpr int64_t kPanel = 32;       // outputs of one panel: two vectors
constexpr int64_t kMaxRows = 12;     // 12 rows x 2 vectors of sums + 2 of weights fill 32 registers
constexpr int64_t kBlockPairs = 1024;  // pairs of inputs whose share of a panel (128 KiB) stays in L2
constexpr int64_t kAheadNbytes = 8192;  // of a stream that is fetched ahead of itself
constexpr int64_t kBlockNbytes = 512 << 10;  // of packed activations that stay in L2

}  // namespace

// Elements of the packed form of [num_outputs, num_inputs].
TANDEM_API int64_t tandem_linear_packed_numel(int64_t num_outputs, int64_t num_inputs) {
  return round_up(num_outputs, kPanel) * round_up(num_inputs, 2);
}

// 1 if this build multiplies bf16 in hardware; without it the framework's own linear is faster.
TANDEM_API int64_t tandem_has_bf16_dot() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

// Asks for huge pages under memory that has not been touched yet.
TANDEM_API void tandem_advise_huge_pages(void* start, int64_t nbytes) {
  uintptr_t first = round_up((uintptr_t)start, 4096), last = ((uintptr_t)start + nbytes) & ~4095ul;
  // Advice only: a kernel without huge pages refuses, and nothing is lost.
  if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
}

TANDEM_API void tandem_linear_pack(const uint16_t* weight, int64_t row_stride, uint16_t* packed,
                                   int64_t num_outputs, int64_t num_inputs) {
  int64_t pairs = round_up(num_inputs, 2) / 2, panels = round_up(num_outputs, kPanel) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) {
    uint16_t* to = packed + panel * pairs * kPanel * 2;
    for (int64_t j = 0; j < kPanel; j++) {
      int64_t output = panel * kPanel + j;
      const uint16_t* from = weight + output * row_stride;
      for (int64_t k = 0; k < pairs * 2; k++) {
        bool is_inside = output < num_outputs && k < num_inputs;
        to[(k / 2 * kPanel + j) * 2 + k % 2] = is_inside ? from[k] : 0;
      }
    }
  }
}

// Rows of the weights, as an embedding reads them: out [num_ids, num_inputs].
TANDEM_API void tandem_linear_rows(const uint16_t* packed, const int64_t* ids, uint16_t* out,
                                   int64_t num_ids, int64_t num_inputs) {
  int64_t pairs = round_up(num_inputs, 2) / 2;
#pragma omp parallel for schedule(static) if (num_ids > 8)
  for (int64_t i = 0; i < num_ids; i++) {
    const uint16_t* from = packed + (ids[i] / kPanel * pairs * kPanel + ids[i] % kPanel) * 2;
    uint16_t* to = out + i * num_inputs;
    for (int64_t k = 0; k + 1 < num_inputs; k += 2) std::memcpy(to + k, from + k * kPanel, 4);
    if (num_inputs % 2) to[num_inputs - 1] = from[(num_inputs - 1) * kPanel];
  }
}

#if defined(__AVX512BF16__)

namespace {

// One tile of rows times one block of a panel. `ahead` is memory that is wanted next: PF lines of
// it are fetched into L2 for every four pairs, because the hardware sees no stream while tiles are
// computed from L2.
template <int R, int PF>
inline void multiply(const uint32_t* rows, const uint16_t* weights, int64_t pairs, float* sums,
                     [[maybe_unused]] const char* ahead) {
  __m512 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    acc[r][0] = _mm512_loadu_ps(sums + r * kPanel);
    acc[r][1] = _mm512_loadu_ps(sums + r * kPanel + 16);
  }
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    __m512bh left = (__m512bh)_mm512_loadu_si512(weights + k * kPanel * 2);
    __m512bh right = (__m512bh)_mm512_loadu_si512(weights + k * kPanel * 2 + 32);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      __m512bh pair = (__m512bh)_mm512_set1_epi32((int)rows[k * R + r]);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], left, pair);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], right, pair);
    }
  };
  int64_t k = 0;
  for (; k + 4 <= pairs; k += 4) {
#pragma GCC unroll 8
    for (int line = 0; line < PF; line++) _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
    ahead += PF * 64;
    step(k);
    step(k + 1);
    step(k + 2);
    step(k + 3);
  }
  for (; k < pairs; k++) step(k);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(sums + r * kPanel, acc[r][0]);
    _mm512_storeu_ps(sums + r * kPanel + 16, acc[r][1]);
  }
}

using Multiply = void (*)(const uint32_t*, const uint16_t*, int64_t, float*, const char*);

template <int PF>
Multiply multiply_for(int64_t rows) {
  static const Multiply table[kMaxRows] = {
      multiply<1, PF>, multiply<2, PF>, multiply<3, PF>, multiply<4, PF>,
      multiply<5, PF>, multiply<6, PF>, multiply<7, PF>, multiply<8, PF>,
      multiply<9, PF>, multiply<10, PF>, multiply<11, PF>, multiply<12, PF>};
  return table[rows - 1];
}

// [num_rows, num_inputs] -> [pairs][tile_rows] of one tile; absent rows and inputs are zero.
void pack_rows(const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs,
               int64_t tile_rows, uint32_t* to) {
  int64_t whole = num_inputs / 2;
  for (int64_t r = 0; r < tile_rows; r++) {
    const uint16_t* from = x + r * x_stride;
    for (int64_t k = 0; k < whole; k++) {
      uint32_t pair = 0;
      if (r < num_rows) std::memcpy(&pair, from + 2 * k, 4);
      to[k * tile_rows + r] = pair;
    }
    if (num_inputs % 2) to[whole * tile_rows + r] = r < num_rows ? from[num_inputs - 1] : 0;
  }
}

thread_local Scratch packed_rows;
thread_local Scratch partial_sums;

}  // namespace

// out [num_rows, num_outputs] = x @ weight^T + bias, x and out bf16 with strided rows, bias fp32
// or null.
TANDEM_API void tandem_linear_bf16(const uint16_t* x, int64_t x_stride, const uint16_t* packed,
                                   const float* bias, uint16_t* out, int64_t out_stride,
                                   int64_t num_rows, int64_t num_outputs, int64_t num_inputs) {
  if (num_rows == 0) return;
  int64_t pairs = round_up(num_inputs, 2) / 2, panels = round_up(num_outputs, kPanel) / kPanel;
  int64_t tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  int64_t tile_rows = (num_rows + tiles - 1) / tiles;
  tiles = (num_rows + tile_rows - 1) / tile_rows;
  bool is_direct = num_rows == 1 && num_inputs % 2 == 0;  // a single row is already packed
  uint32_t* rows = is_direct ? (uint32_t*)x
                             : (uint32_t*)packed_rows.reserve(tiles * tile_rows * pairs * 4);

  int64_t block_tiles = std::max<int64_t>(1, kBlockNbytes / (tile_rows * pairs * 4));
  int64_t row_blocks = (tiles + block_tiles - 1) / block_tiles;
  block_tiles = (tiles + row_blocks - 1) / row_blocks;
  // A few rows leave the memory to the hardware's own streams, which fetching ahead only disturbs.
  // One tile fetches its own stream ahead; of several, each fetches its share of the next block.
  int64_t share = tile_rows <= 4 && tiles == 1 ? 0 : (8 + block_tiles - 1) / block_tiles;
  int64_t lines = share > 4 ? 8 : share > 2 ? 4 : share;
  Multiply multiply_tile = lines == 0   ? multiply_for<0>(tile_rows)
                           : lines == 1 ? multiply_for<1>(tile_rows)
                           : lines == 2 ? multiply_for<2>(tile_rows)
                           : lines == 4 ? multiply_for<4>(tile_rows)
                                        : multiply_for<8>(tile_rows);
  std::atomic<int64_t> next_task{0};

#pragma omp parallel
  {
    if (!is_direct) {
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < tiles; tile++)
        pack_rows(x + tile * tile_rows * x_stride, x_stride,
                  std::min(tile_rows, num_rows - tile * tile_rows), num_inputs, tile_rows,
                  rows + tile * tile_rows * pairs);
    }
    float* sums = (float*)partial_sums.reserve(block_tiles * tile_rows * kPanel * 4);
    // Runs of panels are handed out on demand: a core that is busy elsewhere takes fewer.
    int64_t run = std::max<int64_t>(1, panels / (omp_get_num_threads() * 8));
    int64_t runs = (panels + run - 1) / run, num_tasks = runs * row_blocks;
    for (int64_t task = next_task++; task < num_tasks; task = next_task++) {
      int64_t first_tile = task / runs * block_tiles;
      int64_t last_tile = std::min(tiles, first_tile + block_tiles);
      int64_t first_panel = task % runs * run, last_panel = std::min(panels, first_panel + run);
      for (int64_t panel = first_panel; panel < last_panel; panel++) {
        for (int64_t k = 0; k < pairs; k += kBlockPairs) {
          int64_t block = std::min(kBlockPairs, pairs - k);
          const uint16_t* weights = packed + (panel * pairs + k) * kPanel * 2;
          const char* ahead = (const char*)weights +
                              (tiles == 1 ? kAheadNbytes : block * kPanel * 2 * (int64_t)sizeof(uint16_t));
          for (int64_t tile = first_tile; tile < last_tile; tile++) {
            float* tile_sums = sums + (tile - first_tile) * tile_rows * kPanel;
            if (k == 0) {
              for (int64_t r = 0; r < tile_rows; r++)
                for (int64_t j = 0; j < kPanel; j++)
                  tile_sums[r * kPanel + j] =
                      bias && panel * kPanel + j < num_outputs ? bias[panel * kPanel + j] : 0.0f;
            }
            multiply_tile(rows + (tile * pairs + k) * tile_rows, weights, block, tile_sums,
                          ahead + (tile - first_tile) * (block / 4) * lines * 64);
            if (k + block == pairs) {
              int64_t width = std::min(kPanel, num_outputs - panel * kPanel);
              for (int64_t r = 0; r < tile_rows && tile * tile_rows + r < num_rows; r++) {
                bf16* to = (bf16*)out + (tile * tile_rows + r) * out_stride + panel * kPanel;
                store_some(to, load(tile_sums + r * kPanel), width);
                if (width > kLanes)
                  store_some(to + kLanes, load(tile_sums + r * kPanel + kLanes), width - kLanes);
              }
            }
          }
        }
      }
    }
  }
}

#endif
