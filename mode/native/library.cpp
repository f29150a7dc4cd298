// The operators as torch knows them, torch.ops.deepspeed_mode.*, for float32 and float64. All tensors are contiguous but
// where a kernel says otherwise. They are called by mode/native/functions.py only, which does autograd.

#include <torch/library.h>

#include "experts.h"
#include "layers.h"

using namespace deepspeed_mode;

// `f<double>` or `f<float>` of these arguments, by the type of the first of them.
#define BY_TYPE(f, first, ...)                                                                      \
  ((first).scalar_type() == at::kDouble ? f<double>((first), __VA_ARGS__) : f<float>((first), __VA_ARGS__))

TORCH_LIBRARY(deepspeed_mode, library) {
  library.def(
      "mix(Tensor x, Tensor choices, Tensor gates, Tensor w1, Tensor w2, Tensor w3) -> (Tensor, Tensor, Tensor)",
      [](const Tensor& x, const Tensor& choices, const Tensor& gates, const Tensor& w1, const Tensor& w2,
         const Tensor& w3) {
        TORCH_CHECK(x.dim() == 2 && choices.dim() == 2 && choices.size(0) == x.size(0) && choices.size(1) > 0 &&
                        gates.sizes() == choices.sizes(),
                    "mix: tokens, choices and gates have shapes ", x.sizes(), ", ", choices.sizes(), " and ",
                    gates.sizes(), "; they must be [T, D], [T, K] and [T, K]");
        return BY_TYPE(mix, x, choices, gates, w1, w2, w3);
      });
  library.def(
      "mix_backward(Tensor grad, Tensor x, Tensor choices, Tensor gates, Tensor gate, Tensor up, Tensor w1, Tensor w2, "
      "Tensor w3) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      [](const Tensor& grad, const Tensor& x, const Tensor& choices, const Tensor& gates, const Tensor& gate,
         const Tensor& up, const Tensor& w1, const Tensor& w2, const Tensor& w3) {
        return BY_TYPE(mix_backward, grad, x, choices, gates, gate, up, w1, w2, w3);
      });
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
              [](const Tensor& x, const Tensor& weight, double eps) { return BY_TYPE(rms_norm, x, weight, eps); });
  library.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
              [](const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& scale) {
                return BY_TYPE(rms_norm_backward, grad, x, weight, scale);
              });
  library.def("rotate(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
              [](const Tensor& x, const Tensor& cos, const Tensor& sin, bool back) {
                return BY_TYPE(rotate, x, cos, sin, back);
              });
  library.def("choose(Tensor logits, Tensor ranked, int top_k) -> (Tensor, Tensor, Tensor)",
              [](const Tensor& logits, const Tensor& ranked, int64_t top_k) {
                return BY_TYPE(choose, logits, ranked, top_k);
              });
  library.def("choose_backward(Tensor grad_gates, Tensor scores, Tensor choices, Tensor? grad_scores) -> Tensor",
              [](const Tensor& grad_gates, const Tensor& scores, const Tensor& choices,
                 const std::optional<Tensor>& grad_scores) {
                return BY_TYPE(choose_backward, grad_gates, scores, choices, grad_scores);
              });
}
