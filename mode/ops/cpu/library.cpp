// The operators as torch knows them, torch.ops.deepspeed_mode.*, for float32 and float64 on CPUs. All tensors are
// contiguous but where a kernel says otherwise. mode/ops/operators.py alone calls them, and does autograd.

#include <torch/library.h>

#include "experts.h"
#include "layers.h"

using namespace deepspeed_mode;

// `f<double>` or `f<float>` of these arguments, by the type of the first of them.
#define BY_TYPE(f, first, ...)                                                                      \
  ((first).scalar_type() == at::kDouble ? f<double>((first), __VA_ARGS__) : f<float>((first), __VA_ARGS__))

// Registered for CPUs alone: torch refuses tensors of another device instead of handing over their pointers.
template <class Function>
torch::CppFunction on_cpu(Function&& function) {
  return torch::dispatch(c10::DeviceType::CPU, std::forward<Function>(function));
}

// Rejects shapes that would read out of bounds.
void check(bool fits, const char* name, const char* wanted) { TORCH_CHECK(fits, name, ": shapes must be ", wanted); }

bool is(const Tensor& x, at::IntArrayRef sizes) { return x.sizes() == sizes; }

TORCH_LIBRARY(deepspeed_mode, library) {
  library.def(
      "mix(Tensor x, Tensor choices, Tensor gates, Tensor w1, Tensor w2, Tensor w3) -> (Tensor, Tensor, Tensor)",
      on_cpu([](const Tensor& x, const Tensor& choices, const Tensor& gates, const Tensor& w1, const Tensor& w2,
         const Tensor& w3) {
        check(x.dim() == 2 && choices.dim() == 2 && choices.size(0) == x.size(0) && choices.size(1) > 0 &&
                  is(gates, choices.sizes()) && w1.dim() == 3 && w1.size(2) == x.size(1) && is(w3, w1.sizes()) &&
                  is(w2, {w1.size(0), w1.size(2), w1.size(1)}),
              "mix", "tokens [T, D], choices and gates [T, K], weights [E, F, D], [E, D, F] and [E, F, D]");
        return BY_TYPE(mix, x, choices, gates, w1, w2, w3);
      }));
  library.def(
      "mix_backward(Tensor grad, Tensor x, Tensor choices, Tensor gates, Tensor gate, Tensor up, Tensor w1, Tensor w2, "
      "Tensor w3) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      on_cpu([](const Tensor& grad, const Tensor& x, const Tensor& choices, const Tensor& gates, const Tensor& gate,
         const Tensor& up, const Tensor& w1, const Tensor& w2, const Tensor& w3) {
        return BY_TYPE(mix_backward, grad, x, choices, gates, gate, up, w1, w2, w3);
      }));
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
              on_cpu([](const Tensor& x, const Tensor& weight, double eps) {
                check(x.dim() == 2 && is(weight, {x.size(1)}) && weight.is_contiguous(), "rms_norm", "[T, D] and [D]");
                return BY_TYPE(rms_norm, x, weight, eps);
              }));
  library.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
              on_cpu([](const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& scale) {
                return BY_TYPE(rms_norm_backward, grad, x, weight, scale);
              }));
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor",
              on_cpu([](const Tensor& x, const Tensor& cos, const Tensor& sin) {
                check(x.dim() == 4 && x.size(3) % 2 == 0 && x.stride(3) == 1 &&
                          is(cos, {x.size(0), x.size(1), x.size(3) / 2}) && is(sin, cos.sizes()) &&
                          cos.stride(2) == 1 && sin.stride(2) == 1,
                      "rotate", "[B, S, N, H], and [B, S, H / 2] for cosines and sines");
                return BY_TYPE(rotate, x, cos, sin);
              }));
  library.def("rotate_backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor cos, Tensor sin) -> Tensor",
              on_cpu([](const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v, const Tensor& cos,
                 const Tensor& sin) { return BY_TYPE(rotate_backward, grad_q, grad_k, grad_v, cos, sin); }));
  library.def("route(Tensor x, Tensor weight, Tensor? bias, int top_k) -> (Tensor, Tensor, Tensor, Tensor)",
              on_cpu([](const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t top_k) {
                check(x.dim() == 2 && weight.dim() == 2 && weight.size(1) == x.size(1) &&
                          (!bias || is(*bias, {weight.size(0)})) && 0 < top_k && top_k <= weight.size(0),
                      "route", "tokens [T, D], weights [J, D] and a bias [J], with as many columns as choices");
                return BY_TYPE(route, x, weight, bias, top_k);
              }));
  library.def(
      "route_backward(Tensor grad_gates, Tensor? grad_scores, Tensor? grad_logits, Tensor x, Tensor "
      "weight, Tensor scores, Tensor choices) -> (Tensor, Tensor)",
      on_cpu([](const Tensor& grad_gates, const std::optional<Tensor>& grad_scores,
         const std::optional<Tensor>& grad_logits, const Tensor& x, const Tensor& weight, const Tensor& scores,
         const Tensor& choices) {
        return BY_TYPE(route_backward, grad_gates, grad_scores, grad_logits, x, weight, scores, choices);
      }));
  library.def("score_backward(Tensor grad_score, Tensor x, Tensor weight) -> (Tensor, Tensor)",
              on_cpu([](const Tensor& grad_score, const Tensor& x, const Tensor& weight) {
                check(x.dim() == 2 && is(grad_score, {x.size(0)}) && is(weight, {x.size(1)}),
                      "score_backward", "[T], [T, D] and [D]");
                return BY_TYPE(score_backward, grad_score, x, weight);
              }));
  library.def("cross_entropy(Tensor logits, Tensor targets, int ignored) -> (Tensor, Tensor, Tensor)",
              on_cpu([](const Tensor& logits, const Tensor& targets, int64_t ignored) {
                check(logits.dim() == 2 && is(targets, {logits.size(0)}), "cross_entropy", "[T, V] and [T]");
                TORCH_CHECK(targets.is_cpu(), "cross_entropy: logits are on the CPU, labels on ", targets.device());
                return BY_TYPE(cross_entropy, logits, targets, ignored);
              }));
  library.def(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor targets, Tensor largest, Tensor log_sums, "
      "int ignored) -> Tensor",
      on_cpu([](const Tensor& grad, const Tensor& logits, const Tensor& targets, const Tensor& largest, const Tensor& log_sums,
         int64_t ignored) {
        return BY_TYPE(cross_entropy_backward, grad, logits, targets, largest, log_sums, ignored);
      }));
}
