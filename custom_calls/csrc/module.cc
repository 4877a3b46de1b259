// The Python module `_cpu`: every handler by the name of its target.
#include "nanobind/nanobind.h"
#include "nanobind/stl/shared_ptr.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"

#include "ep_group.h"
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
  add("jaxmoe_hold_until", kHoldUntil);
  add("jaxmoe_ep_rank", kEpRank);
  add("jaxmoe_loopback_dispatch_start", kEpDispatchStart);
  add("jaxmoe_loopback_normal_dispatch_finish", kEpNormalDispatchFinish);
  add("jaxmoe_loopback_low_latency_dispatch_finish", kEpLowLatencyDispatchFinish);
  add("jaxmoe_loopback_combine_start", kEpCombineStart);
  add("jaxmoe_loopback_combine_finish", kEpCombineFinish);
  return targets;
}

nb::dict CountersOf(const EpGroup& group) {
  nb::dict counters;
  counters["starts"] = group.counters.starts.load();
  counters["finishes"] = group.counters.finishes.load();
  counters["waited"] = group.counters.waited.load();
  counters["local_rows"] = group.counters.local_rows.load();
  counters["remote_rows"] = group.counters.remote_rows.load();
  counters["remote_bytes"] = group.counters.remote_bytes.load();
  counters["under_way_seconds"] = 1e-9 * static_cast<double>(group.counters.under_way.load());
  counters["awaited_seconds"] = 1e-9 * static_cast<double>(group.counters.awaited.load());
  return counters;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("registrations", &Registrations);
  m.def("ep_group_bytes", &EpGroup::SharedBytes, nb::arg("num_members"), nb::arg("max_ranks"),
        nb::arg("num_channels"), nb::arg("window_bytes"));
  m.def("set_ep_group", &SetCurrentEpGroup, nb::arg("group").none(),
        nb::call_guard<nb::gil_scoped_release>());
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<EpGroup>(m, "EpGroup")
      .def(
          "__init__",
          [](EpGroup* self, const std::string& name, const std::string& description,
             int64_t num_members, int64_t member, int64_t max_ranks, int64_t first_rank,
             const std::vector<int64_t>& devices, int64_t num_channels, int64_t window_bytes,
             double timeout, double join_timeout, double latency, double bandwidth) {
            EpGroupOptions options;
            options.name = name;
            options.description = description;
            options.num_members = num_members;
            options.member = member;
            options.max_ranks = max_ranks;
            options.first_rank = first_rank;
            options.devices = devices;
            options.num_channels = num_channels;
            options.window_bytes = window_bytes;
            options.timeout = timeout;
            options.join_timeout = join_timeout;
            options.latency = latency;
            options.bandwidth = bandwidth;
            new (self) EpGroup(options);
          },
          nb::kw_only(), nb::arg("name"), nb::arg("description"), nb::arg("num_members"),
          nb::arg("member"), nb::arg("max_ranks"), nb::arg("first_rank"), nb::arg("devices"),
          nb::arg("num_channels"), nb::arg("window_bytes"), nb::arg("timeout"),
          nb::arg("join_timeout"), nb::arg("latency"), nb::arg("bandwidth"), Release())
      .def("agree", &EpGroup::Agree, nb::arg("values"), nb::arg("timeout"), Release())
      .def("wait", &EpGroup::Wait, Release())
      .def("wake", &EpGroup::Wake, Release())
      .def("set_active", &EpGroup::SetActive, nb::arg("ranks"), Release())
      .def("wait_active", &EpGroup::WaitActive, nb::arg("timeout"), Release())
      .def("recover", &EpGroup::Recover, Release())
      .def("active", &EpGroup::Active)
      .def("failure", &EpGroup::Failure)
      .def("counters", &CountersOf);
}

}  // namespace jaxmoe
