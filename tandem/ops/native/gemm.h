// A tile of fp32 sums in registers, for matrix products inside other kernels.
#pragma once

#include "vec.h"

constexpr int64_t kTileRows = 6;  // 6 rows x 4 vectors of sums + 4 of operands fit 32 registers

// R rows of V vectors. The caller adds products and terms, then stores.
template <int R, int V>
struct Tile {
  f32x16 acc[R][V];

  INLINE_MEMBER void clear() {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] = splat(0.0f);
  }

  INLINE_MEMBER void from_scaled(const float* from, int64_t stride, float factor) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] = load(from + r * stride + v * kLanes) * factor;
  }

  // += a b for a [R, depth] with any strides and b [depth, 16 V] with contiguous rows.
  INLINE_MEMBER void add(const float* a, int64_t a_row, int64_t a_depth, const float* b,
                         int64_t b_depth, int64_t depth) {
    for (int64_t k = 0; k < depth; k++) {
      f32x16 right[V];
      for (int v = 0; v < V; v++) right[v] = load(b + k * b_depth + v * kLanes);
      for (int r = 0; r < R; r++) {
        f32x16 left = splat(a[r * a_row + k * a_depth]);
        for (int v = 0; v < V; v++) acc[r][v] += left * right[v];
      }
    }
  }

  INLINE_MEMBER void scale(const float* factors) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] *= factors[r];
  }

  INLINE_MEMBER void add_scaled(const float* from, int64_t stride, float factor) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] += load(from + r * stride + v * kLanes) * factor;
  }

  INLINE_MEMBER void to(float* out, int64_t stride) const {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(out + r * stride + v * kLanes, acc[r][v]);
  }
};

// Columns that a matrix of `count` is padded to, at most four vectors: what a tile can have.
INLINE int64_t tile_columns(int64_t count) {
  return count <= 16 ? 16 : count <= 32 ? 32 : 64;
}

// Runs `use` with a tile of 1 to 6 rows and of tile_columns(...) columns.
template <typename F>
INLINE void with_tile(int64_t rows, int64_t columns, F&& use) {
  auto of_rows = [&](auto tag) __attribute__((always_inline)) {
    constexpr int V = decltype(tag)::value;
    switch (rows) {
      case 1: use(Tile<1, V>{}); break;
      case 2: use(Tile<2, V>{}); break;
      case 3: use(Tile<3, V>{}); break;
      case 4: use(Tile<4, V>{}); break;
      case 5: use(Tile<5, V>{}); break;
      default: use(Tile<6, V>{}); break;
    }
  };
  switch (columns) {
    case 16: of_rows(std::integral_constant<int, 1>{}); break;
    case 32: of_rows(std::integral_constant<int, 2>{}); break;
    default: of_rows(std::integral_constant<int, 4>{}); break;
  }
}
