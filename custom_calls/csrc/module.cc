// The Python module `_cpu`: every handler by the name of its target.
#include "nanobind/nanobind.h"

#include "handlers.h"

namespace jaxmoe {
namespace {

namespace nb = ::nanobind;

nb::dict Registrations() {
  nb::dict targets;
  auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("jaxmoe_cpu_grouped_gemm_contiguous", kGroupedGemmContiguous);
  add("jaxmoe_cpu_grouped_gemm_masked", kGroupedGemmMasked);
  add("jaxmoe_cpu_permute_contiguous", kPermuteContiguous);
  add("jaxmoe_cpu_permute_masked", kPermuteMasked);
  add("jaxmoe_cpu_unpermute", kUnpermute);
  add("jaxmoe_cpu_gemm", kGemm);
  add("jaxmoe_cpu_gemm_by_head", kGemmByHead);
  add("jaxmoe_cpu_silu_and_mul_contiguous", kSiluAndMulContiguous);
  add("jaxmoe_cpu_silu_and_mul_masked", kSiluAndMulMasked);
  add("jaxmoe_cpu_mla_prefill", kMlaPrefill);
  add("jaxmoe_cpu_mla_decode", kMlaDecode);
  return targets;
}

}  // namespace

NB_MODULE(_cpu, m) { m.def("registrations", &Registrations); }

}  // namespace jaxmoe
