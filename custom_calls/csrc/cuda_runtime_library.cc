#include "cuda_runtime_library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace jaxmoe {

CudaRuntime::CudaRuntime(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(path + " has no " + name);
  };
  find(GetErrorString, "cudaGetErrorString");
  find(GetLastError, "cudaGetLastError");
  find(GetDevice, "cudaGetDevice");
  find(SetDevice, "cudaSetDevice");
  find(DeviceGetAttribute, "cudaDeviceGetAttribute");
  find(DeviceEnablePeerAccess, "cudaDeviceEnablePeerAccess");
  find(DeviceSynchronize, "cudaDeviceSynchronize");
  find(StreamIsCapturing, "cudaStreamIsCapturing");
  find(Malloc, "cudaMalloc");
  find(Free, "cudaFree");
  find(Memset, "cudaMemset");
  find(Memcpy, "cudaMemcpy");
  find(GetSymbolAddress, "cudaGetSymbolAddress");
  find(IpcGetMemHandle, "cudaIpcGetMemHandle");
  find(IpcOpenMemHandle, "cudaIpcOpenMemHandle");
  find(IpcCloseMemHandle, "cudaIpcCloseMemHandle");
}

}  // namespace jaxmoe
