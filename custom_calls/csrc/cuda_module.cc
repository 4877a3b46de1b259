// The Python module `_cuda`: the handlers by the name of their target, and what they share.
#include "nanobind/nanobind.h"
#include "nanobind/stl/map.h"
#include "nanobind/stl/shared_ptr.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"

#include "cuda_driver.h"
#include "deep_ep.h"
#include "deep_gemm.h"

namespace jaxmoe {
namespace {

namespace nb = ::nanobind;

nb::dict DeepGemmRegistrations() {
  nb::dict targets;
  auto add = [&](const char* name, XLA_FFI_Handler* execute) {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(kDeepGemmInstantiate));
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
    targets[name] = stages;
  };
  add("jaxmoe_cuda_deep_gemm_fp8", kDeepGemmFp8);
  add("jaxmoe_cuda_deep_gemm_bf16", kDeepGemmBf16);
  return targets;
}

nb::dict DeepEpRegistrations() {
  nb::dict targets;
  auto add = [&](const char* name, XLA_FFI_Handler* execute) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(execute));
  };
  add("jaxmoe_cuda_deep_ep_low_latency_dispatch_start", kDeepEpLowLatencyDispatchStart);
  add("jaxmoe_cuda_deep_ep_low_latency_dispatch_finish", kDeepEpLowLatencyDispatchFinish);
  add("jaxmoe_cuda_deep_ep_low_latency_combine_start", kDeepEpLowLatencyCombineStart);
  add("jaxmoe_cuda_deep_ep_low_latency_combine_finish", kDeepEpLowLatencyCombineFinish);
  add("jaxmoe_cuda_deep_ep_normal_dispatch", kDeepEpNormalDispatch);
  add("jaxmoe_cuda_deep_ep_normal_combine", kDeepEpNormalCombine);
  return targets;
}

void Register(int64_t id, nb::bytes cubin, bool is_fp8, int64_t layout, int64_t num_groups,
              int64_t num_out, int64_t depth, int64_t block_m, int64_t block_n, int64_t swizzle_d,
              int64_t num_threads, int64_t shared_bytes, int64_t cluster_size, int64_t num_sms) {
  DeepGemmKernel kernel{is_fp8,    static_cast<GemmLayout>(layout),
                        num_groups, num_out,
                        depth,      block_m,
                        block_n,    swizzle_d,
                        num_threads, shared_bytes,
                        cluster_size, num_sms};
  std::string data(cubin.c_str(), cubin.size());
  std::string error;
  {
    nb::gil_scoped_release release;
    error = RegisterDeepGemmKernel(id, data, kernel);
  }
  if (!error.empty()) throw std::runtime_error(error);
}

std::vector<std::string> Texts(const std::vector<nb::bytes>& all) {
  std::vector<std::string> texts;
  for (const nb::bytes& one : all) texts.emplace_back(one.c_str(), one.size());
  return texts;
}

std::vector<nb::bytes> Bytes(const std::vector<std::string>& all) {
  std::vector<nb::bytes> bytes;
  for (const std::string& one : all) bytes.emplace_back(one.data(), one.size());
  return bytes;
}

void BindDeepEp(nb::module_& m) {
  nb::class_<DeepEpLibrary>(m, "DeepEpLibrary")
      .def(nb::init<const std::string&, const std::string&, const std::vector<std::string>&>(),
           nb::kw_only(), nb::arg("extension"), nb::arg("cuda_runtime"), nb::arg("stubs"))
      .def_ro("low_latency_hidden_sizes", &DeepEpLibrary::low_latency_hidden_sizes)
      .def_ro("low_latency_max_top_k", &DeepEpLibrary::low_latency_max_top_k)
      .def_ro("normal_num_ranks", &DeepEpLibrary::normal_num_ranks);
  nb::class_<DeepEpGroup>(m, "DeepEpGroup")
      .def(
          "__init__",
          [](DeepEpGroup* self, std::shared_ptr<DeepEpLibrary> library, int64_t num_ranks,
             int64_t num_experts, int64_t hidden, int64_t num_micro_batches,
             int64_t low_latency_bytes, int64_t normal_bytes, int64_t low_latency_sms,
             int64_t normal_sms, int64_t dispatch_send_tokens, int64_t combine_send_tokens,
             int64_t receive_tokens, int64_t first_rank, std::vector<int64_t> devices) {
            new (self) DeepEpGroup(
                std::move(library),
                {num_ranks, num_experts, hidden, num_micro_batches, low_latency_bytes, normal_bytes,
                 low_latency_sms, normal_sms, dispatch_send_tokens, combine_send_tokens,
                 receive_tokens},
                first_rank, std::move(devices));
          },
          nb::arg("library"), nb::kw_only(), nb::arg("num_ranks"), nb::arg("num_experts"),
          nb::arg("hidden"), nb::arg("num_micro_batches"), nb::arg("low_latency_bytes"),
          nb::arg("normal_bytes"), nb::arg("low_latency_sms"), nb::arg("normal_sms"),
          nb::arg("dispatch_send_tokens"), nb::arg("combine_send_tokens"),
          nb::arg("receive_tokens"), nb::arg("first_rank"), nb::arg("devices"))
      .def("handles", [](const DeepEpGroup& self) { return Bytes(self.Handles()); })
      .def("connect",
           [](DeepEpGroup& self, const std::vector<nb::bytes>& handles) {
             self.Connect(Texts(handles));
           })
      .def("set_active", &DeepEpGroup::SetActive)
      .def("lost", &DeepEpGroup::Lost)
      .def("clear", &DeepEpGroup::Clear, nb::call_guard<nb::gil_scoped_release>());
  m.def("deep_ep_registrations", &DeepEpRegistrations);
  m.def("set_deep_ep_group", &SetDeepEpGroup, nb::arg("group").none());
  m.def("deep_ep_launches", &DeepEpLaunches);
}

// Why the driver cannot be used, or "".
std::string Missing() {
  std::string error;
  GetCudaDriver(&error);
  return error;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("deep_gemm_registrations", &DeepGemmRegistrations);
  m.def("missing", &Missing);
  m.def("register_deep_gemm_kernel", &Register, nb::arg("id"), nb::arg("cubin"), nb::kw_only(),
        nb::arg("is_fp8"), nb::arg("layout"), nb::arg("num_groups"), nb::arg("num_out"),
        nb::arg("depth"), nb::arg("block_m"), nb::arg("block_n"), nb::arg("swizzle_d"),
        nb::arg("num_threads"), nb::arg("shared_bytes"), nb::arg("cluster_size"),
        nb::arg("num_sms"));
  m.def("announce_deep_gemm_kernel", &AnnounceDeepGemmKernel, nb::arg("id"));
  m.def("fail_deep_gemm_kernel", &FailDeepGemmKernel, nb::arg("id"), nb::arg("error"));
  m.def("deep_gemm_launches", &DeepGemmLaunches);
  m.def("deep_gemm_host_nanoseconds", &DeepGemmHostNanoseconds);
  BindDeepEp(m);
}

}  // namespace jaxmoe
