#include "deep_ep_library.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string_view>

namespace jaxmoe {
namespace {

using Visit = std::function<void(const char* name, const Elf64_Sym& symbol)>;

// All symbols of a file, local ones too.
void ForEachSymbol(const std::string& path, const Visit& visit) {
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (file < 0 || fstat(file, &status) != 0) {
    if (file >= 0) close(file);
    throw std::runtime_error(path + ": " + std::strerror(errno));
  }
  const size_t size = static_cast<size_t>(status.st_size);
  void* mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error(path + ": " + std::strerror(errno));
  const char* bytes = static_cast<const char*>(mapped);
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(bytes);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(bytes + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(bytes + sections[i].sh_offset);
    const char* names = bytes + sections[sections[i].sh_link].sh_offset;
    for (size_t s = 0; s < sections[i].sh_size / sizeof(Elf64_Sym); ++s) {
      visit(names + symbols[s].st_name, symbols[s]);
    }
  }
  munmap(mapped, size);
}

// Kernels by their first template parameters: hidden size and top-k follow, or the number of ranks.
constexpr char kLowLatencyCombine[] = "_ZN7deep_ep6legacy12internode_ll7combineILb0ELi";
constexpr char kNotifyDispatch[] = "_ZN7deep_ep6legacy9intranode15notify_dispatchILi";

// What follows the prefix, or null.
const char* After(const char* name, std::string_view prefix) {
  return std::string_view(name).starts_with(prefix) ? name + prefix.size() : nullptr;
}

void InsertSorted(std::vector<int64_t>* values, int64_t value) {
  auto at = std::lower_bound(values->begin(), values->end(), value);
  if (at == values->end() || *at != value) values->insert(at, value);
}

}  // namespace

DeepEpLibrary::DeepEpLibrary(const std::string& extension, const std::string& cuda_runtime,
                             const std::vector<std::string>& stubs)
    : cuda(cuda_runtime) {
  for (const std::string& stub : stubs) {
    if (dlopen(stub.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) throw std::runtime_error(dlerror());
  }
  void* library = dlopen(extension.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(extension + " has no " + name);
  };
  // The names spell the parameters' types.
  find(get_dispatch_layout,
       "_ZN7deep_ep6legacy6layout19get_dispatch_layoutEPKlPiS4_S4_PbiiiiP11CUstream_st");
  find(notify_dispatch,
       "_ZN7deep_ep6legacy9intranode15notify_dispatchEPKiPiiS3_S4_iiPKbS4_S4_iiPPvPS4_iP11CUstream_"
       "sti");
  find(normal_dispatch,
       "_ZN7deep_ep6legacy9intranode8dispatchEPvPfPiPlS3_S4_S4_PKvPKfPKlS9_PKbPKiiiiiiiiiPS2_"
       "iiP11CUstream_stiii");
  find(cached_notify_combine,
       "_ZN7deep_ep6legacy9intranode21cached_notify_combineEPPvPiiiiPS4_iiP11CUstream_st");
  find(normal_combine,
       "_ZN7deep_ep6legacy9intranode7combineE14cudaDataType_tPvPfPKvPKfS6_S6_PKiSA_SA_PiiiiiPS3_"
       "iiP11CUstream_stiii");
  find(low_latency_dispatch,
       "_ZN7deep_ep6legacy12internode_ll8dispatchEPvS2_PiPlS3_S3_S3_S4_PKfS2_S3_S2_PKvPKlS3_"
       "iiiiiiiibbbbS2_iP11CUstream_sti");
  find(low_latency_combine,
       "_ZN7deep_ep6legacy12internode_ll7combineEPvS2_PiS2_PKvPKlPKfPKiS7_S3_PlS3_"
       "iiiiiiiibS2_iP11CUstream_stibbPjj");

  struct link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) throw std::runtime_error(dlerror());
  const char* base = reinterpret_cast<const char*>(map->l_addr);
  ForEachSymbol(extension, [&](const char* name, const Elf64_Sym& symbol) {
    if (std::strcmp(name, "nvshmemi_device_state_d") == 0 && symbol.st_size == NvshmemState::kSize) {
      nvshmem_state = base + symbol.st_value;
    } else if (std::strcmp(name, "nvshmemi_ibgda_device_state_d") == 0 &&
               symbol.st_size == IbgdaState::kSize) {
      ibgda_state = base + symbol.st_value;
    } else if (const char* sizes = After(name, kLowLatencyCombine)) {
      char* end = nullptr;
      const long long hidden = std::strtoll(sizes, &end, 10);
      if (const char* top_k = After(end, "ELi")) {
        InsertSorted(&low_latency_hidden_sizes, hidden);
        low_latency_max_top_k = std::atoll(top_k);
      }
    } else if (const char* ranks = After(name, kNotifyDispatch)) {
      InsertSorted(&normal_num_ranks, std::atoll(ranks));
    }
  });
  if (nvshmem_state == nullptr || ibgda_state == nullptr) {
    throw std::runtime_error(extension + " has no nvshmemi_device_state_d of " +
                             std::to_string(NvshmemState::kSize) +
                             " bytes with a nvshmemi_ibgda_device_state_d of " +
                             std::to_string(IbgdaState::kSize));
  }
  if (low_latency_hidden_sizes.empty() || normal_num_ranks.empty()) {
    throw std::runtime_error(extension + " has no kernels for intranode dispatch and combine");
  }
}

}  // namespace jaxmoe
