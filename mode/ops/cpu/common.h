// What the kernels share: rows divided among the cores, and sums and sigmoids of vectors.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <numeric>

namespace deepspeed_mode {

using at::Tensor;

constexpr int64_t GRAIN = 64;   // rows from which on a second core is worth waking
constexpr int64_t PIECE = 256;  // rows that one core does at a time; they stay in its cache until all is done with them

template <class Work>
void for_each_row(int64_t rows, const Work& work) {
  at::parallel_for(0, rows, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) work(r);
  });
}

// [width]: the sum of what `work(row, sums)` adds for every row; the same for any number of cores.
template <class T, class Work>
Tensor sum_over_rows(int64_t rows, int64_t width, const at::TensorOptions& options, const Work& work) {
  const int64_t pieces = (rows + PIECE - 1) / PIECE;
  Tensor sums_PD = at::zeros({pieces, width}, options);
  T* sums = sums_PD.mutable_data_ptr<T>();
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++)
      for (int64_t r = p * PIECE; r < std::min(rows, (p + 1) * PIECE); r++) work(r, sums + p * width);
  });
  return sums_PD.sum(0);
}

template <class T>
T sum_of(const at::vec::Vectorized<T>& x) {
  T parts[at::vec::Vectorized<T>::size()];
  x.store(parts);
  return std::accumulate(std::begin(parts), std::end(parts), T(0));
}

template <class T>
at::vec::Vectorized<T> sigmoid(const at::vec::Vectorized<T>& x) {
  using V = at::vec::Vectorized<T>;
  return V(1) / (V(1) + x.neg().exp());
}

}  // namespace deepspeed_mode
