// The CUDA driver, found when it is first needed: the module builds and loads where there is none.
#pragma once

#include <cuda.h>

#include <string>

namespace jaxmoe {

// The entry points used here, with the driver's own names and signatures.
struct CudaDriver {
  decltype(&::cuGetErrorString) GetErrorString;
  decltype(&::cuInit) Init;
  decltype(&::cuDeviceGet) DeviceGet;
  decltype(&::cuDeviceGetCount) DeviceGetCount;
  decltype(&::cuDevicePrimaryCtxRetain) DevicePrimaryCtxRetain;
  decltype(&::cuCtxPushCurrent) CtxPushCurrent;
  decltype(&::cuCtxPopCurrent) CtxPopCurrent;
  decltype(&::cuLibraryLoadData) LibraryLoadData;
  decltype(&::cuLibraryGetKernelCount) LibraryGetKernelCount;
  decltype(&::cuLibraryEnumerateKernels) LibraryEnumerateKernels;
  decltype(&::cuKernelGetFunction) KernelGetFunction;
  decltype(&::cuKernelSetAttribute) KernelSetAttribute;
  decltype(&::cuTensorMapEncodeTiled) TensorMapEncodeTiled;
  decltype(&::cuLaunchKernelEx) LaunchKernelEx;
  decltype(&::cuStreamIsCapturing) StreamIsCapturing;
};

// The driver, or null with the reason in `error`. Safe from any thread.
const CudaDriver* GetCudaDriver(std::string* error);

// "cuInit: no CUDA-capable device is detected".
std::string CudaErrorText(const CudaDriver& driver, const char* call, CUresult result);

}  // namespace jaxmoe
