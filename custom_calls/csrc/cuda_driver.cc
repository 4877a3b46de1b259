#include "cuda_driver.h"

#include <dlfcn.h>

namespace jaxmoe {
namespace {

struct Loaded {
  CudaDriver driver{};
  std::string error;
};

// The names that cuda.h maps to a versioned symbol must be looked up with their version.
#define JAXMOE_TEXT_(name) #name
#define JAXMOE_TEXT(name) JAXMOE_TEXT_(name)
#define JAXMOE_LOAD(name)                                                                      \
  loaded.driver.name =                                                                         \
      reinterpret_cast<decltype(loaded.driver.name)>(dlsym(library, JAXMOE_TEXT(cu##name)));   \
  if (loaded.driver.name == nullptr) {                                                         \
    loaded.error = std::string("libcuda.so.1 has no ") + JAXMOE_TEXT(cu##name) + ": CUDA 12 or newer is needed"; \
    return loaded;                                                                             \
  }

Loaded Load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.error = dlerror();
    return loaded;
  }
  JAXMOE_LOAD(GetErrorString)
  JAXMOE_LOAD(Init)
  JAXMOE_LOAD(DeviceGet)
  JAXMOE_LOAD(DeviceGetCount)
  JAXMOE_LOAD(DevicePrimaryCtxRetain)
  JAXMOE_LOAD(CtxPushCurrent)
  JAXMOE_LOAD(CtxPopCurrent)
  JAXMOE_LOAD(LibraryLoadData)
  JAXMOE_LOAD(LibraryGetKernelCount)
  JAXMOE_LOAD(LibraryEnumerateKernels)
  JAXMOE_LOAD(KernelGetFunction)
  JAXMOE_LOAD(KernelSetAttribute)
  JAXMOE_LOAD(TensorMapEncodeTiled)
  JAXMOE_LOAD(LaunchKernelEx)
  JAXMOE_LOAD(StreamIsCapturing)
  if (CUresult result = loaded.driver.Init(0); result != CUDA_SUCCESS) {
    loaded.error = CudaErrorText(loaded.driver, "cuInit", result);
  }
  return loaded;
}

}  // namespace

const CudaDriver* GetCudaDriver(std::string* error) {
  static const Loaded loaded = Load();
  if (loaded.error.empty()) return &loaded.driver;
  *error = loaded.error;
  return nullptr;
}

std::string CudaErrorText(const CudaDriver& driver, const char* call, CUresult result) {
  const char* text = nullptr;
  driver.GetErrorString(result, &text);
  return std::string(call) + ": " + (text != nullptr ? text : std::to_string(result));
}

}  // namespace jaxmoe
