// The Python module `_cuda`: the handlers by the name of their target, and what they share.
#include "nanobind/nanobind.h"
#include "nanobind/stl/map.h"
#include "nanobind/stl/string.h"

#include "cuda_driver.h"
#include "deep_gemm.h"

namespace jaxmoe {
namespace {

namespace nb = ::nanobind;

nb::dict Registrations() {
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

// Why the driver cannot be used, or "".
std::string Missing() {
  std::string error;
  GetCudaDriver(&error);
  return error;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("registrations", &Registrations);
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
}

}  // namespace jaxmoe
