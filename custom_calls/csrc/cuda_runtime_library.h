// The CUDA runtime as a library that is found at run time: the one a vendor's launchers use, so that
// both see the same current device.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace jaxmoe {

// The entry points used here, with the runtime's own names and signatures.
struct CudaRuntime {
  decltype(&::cudaGetErrorString) GetErrorString;
  decltype(&::cudaGetLastError) GetLastError;
  decltype(&::cudaGetDevice) GetDevice;
  decltype(&::cudaSetDevice) SetDevice;
  decltype(&::cudaDeviceGetAttribute) DeviceGetAttribute;
  decltype(&::cudaDeviceEnablePeerAccess) DeviceEnablePeerAccess;
  decltype(&::cudaDeviceSynchronize) DeviceSynchronize;
  decltype(&::cudaStreamIsCapturing) StreamIsCapturing;
  // As they are in the library; the header's overloads are templates.
  cudaError_t (*Malloc)(void** pointer, size_t size);
  cudaError_t (*Free)(void* pointer);
  cudaError_t (*Memset)(void* pointer, int value, size_t size);
  cudaError_t (*Memcpy)(void* to, const void* from, size_t size, cudaMemcpyKind kind);
  cudaError_t (*GetSymbolAddress)(void** pointer, const void* symbol);
  cudaError_t (*IpcGetMemHandle)(cudaIpcMemHandle_t* handle, void* pointer);
  cudaError_t (*IpcOpenMemHandle)(void** pointer, cudaIpcMemHandle_t handle, unsigned flags);
  cudaError_t (*IpcCloseMemHandle)(void* pointer);

  // Throws std::runtime_error when the library cannot be loaded or lacks one of them.
  explicit CudaRuntime(const std::string& path);
};

}  // namespace jaxmoe
