#include "deep_gemm.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "cuda_driver.h"

namespace jaxmoe {
namespace {

using ffi::DeviceOrdinal;
using ffi::PlatformStream;

constexpr int64_t kScaleBlock = 128;
constexpr int64_t kSwizzle = 128;  // bytes of the operands' rows in shared memory

struct Loaded {
  DeepGemmKernel kernel;
  CUlibrary library;
  std::vector<CUfunction> functions;  // by device ordinal
};

// What is known of a kernel: nothing yet, that it is loaded, or why it never will be. Entries are
// never removed, so a pointer to one stays valid.
struct Entry {
  std::unique_ptr<Loaded> loaded;
  std::string error;
};

struct Registry {
  std::shared_mutex mutex;
  std::condition_variable_any changed;
  std::unordered_map<int64_t, Entry> kernels;
};

Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

constexpr std::array<const char*, 6> kCounterNames = {"bf16_dense",      "bf16_contiguous",
                                                      "bf16_masked",     "fp8_dense",
                                                      "fp8_contiguous",  "fp8_masked"};
std::array<std::atomic<int64_t>, kCounterNames.size()> launches;
std::atomic<int64_t> captured;
std::atomic<int64_t> host_nanoseconds;

class HostTimer {
 public:
  ~HostTimer() {
    auto elapsed = std::chrono::steady_clock::now() - start_;
    host_nanoseconds +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

#define JAXMOE_CUDA(call)                                                                  \
  if (CUresult jaxmoe_result = driver->call; jaxmoe_result != CUDA_SUCCESS)                \
  return Error::Internal(CudaErrorText(*driver, #call, jaxmoe_result))

// A row-major matrix in pieces of box_outer rows by box_inner columns.
struct Tiled {
  CUtensorMapDataType type;
  int64_t element_bytes;
  void* data;
  int64_t inner, outer;
  int64_t box_inner, box_outer;
  int64_t swizzle;
};

CUresult Encode(const CudaDriver* driver, const Tiled& tiled, CUtensorMap* map) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(tiled.inner),
                               static_cast<cuuint64_t>(tiled.outer)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(tiled.inner * tiled.element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(tiled.box_inner),
                             static_cast<cuuint32_t>(tiled.box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  if (tiled.swizzle == 128) swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  if (tiled.swizzle == 64) swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
  if (tiled.swizzle == 32) swizzle = CU_TENSOR_MAP_SWIZZLE_32B;
  return driver->TensorMapEncodeTiled(map, tiled.type, 2, tiled.data, sizes, strides, box, steps,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

std::string Dims(int64_t a, int64_t b, int64_t c) {
  return "[" + std::to_string(a) + ", " + std::to_string(b) + ", " + std::to_string(c) + "]";
}

Error Unknown(int64_t id) {
  return Error(ffi::ErrorCode::kFailedPrecondition,
               "this process has no DeepGEMM kernel " + std::to_string(id) +
                   ": kernels are compiled when a program is traced, in each process");
}

// When an executable is made, not when it runs.
Error Instantiate(int64_t id) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.kernels.find(id);
  if (found == registry.kernels.end()) return Unknown(id);
  const Entry& entry = found->second;
  registry.changed.wait(lock, [&] { return entry.loaded || !entry.error.empty(); });
  if (!entry.loaded) return Error(ffi::ErrorCode::kFailedPrecondition, entry.error);
  return Error::Success();
}

// The sizes of one call, checked against the kernel.
struct Call {
  const CudaDriver* driver;
  const Loaded* loaded;
  int64_t rows;        // of one group when masked, of all otherwise
  int64_t row_groups;  // groups the rows are stored by
};

Error Prepare(int64_t id, int32_t device, const AnyBuffer& x, const AnyBuffer& weights,
              const AnyBuffer& sizes, const AnyBuffer& y, CUstream stream, Call* call) {
  std::string error;
  call->driver = GetCudaDriver(&error);
  JAXMOE_REQUIRE(call->driver != nullptr, error);
  {
    Registry& registry = GetRegistry();
    std::shared_lock lock(registry.mutex);
    auto found = registry.kernels.find(id);
    if (found == registry.kernels.end() || !found->second.loaded) return Unknown(id);
    call->loaded = found->second.loaded.get();
  }
  const DeepGemmKernel& kernel = call->loaded->kernel;
  JAXMOE_REQUIRE(0 <= device && device < static_cast<int64_t>(call->loaded->functions.size()),
                 "device ordinal " + std::to_string(device) + " is not a local device");
  const bool is_masked = kernel.layout == GemmLayout::kMasked;
  auto shape = x.dimensions();
  JAXMOE_REQUIRE(shape.size() == (is_masked ? 3u : 2u) && shape.back() == kernel.depth,
                 "x " + ToString(x) + " does not fit the kernel's depth " +
                     std::to_string(kernel.depth));
  call->rows = shape[shape.size() - 2];
  call->row_groups = is_masked ? shape[0] : 1;
  JAXMOE_REQUIRE(!is_masked || (shape[0] == kernel.num_groups && call->rows % kernel.block_m == 0),
                 "x " + ToString(x) + " must have " + std::to_string(kernel.num_groups) +
                     " groups of a multiple of " + std::to_string(kernel.block_m) + " rows");
  JAXMOE_REQUIRE(static_cast<int64_t>(weights.element_count()) ==
                     kernel.num_groups * kernel.num_out * kernel.depth,
                 "weights " + ToString(weights) + " must be " +
                     Dims(kernel.num_groups, kernel.num_out, kernel.depth));
  JAXMOE_REQUIRE(static_cast<int64_t>(y.element_count()) ==
                     call->row_groups * call->rows * kernel.num_out,
                 "the result " + ToString(y) + " does not fit x " + ToString(x));
  JAXMOE_REQUIRE(kernel.layout == GemmLayout::kDense ||
                     static_cast<int64_t>(sizes.element_count()) == kernel.num_groups,
                 "there must be one size for each group, got " + ToString(sizes));
  ++launches[(kernel.is_fp8 ? 3 : 0) + static_cast<int64_t>(kernel.layout)];
  CUstreamCaptureStatus status;
  if (call->driver->StreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
      status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
    ++captured;
  }
  return Error::Success();
}

Error Launch(const Call& call, int32_t device, CUstream stream, void** arguments) {
  const CudaDriver* driver = call.driver;
  const DeepGemmKernel& kernel = call.loaded->kernel;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(kernel.num_sms);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(kernel.num_threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(kernel.shared_bytes);
  config.hStream = stream;
  CUlaunchAttribute cluster{};
  if (kernel.cluster_size > 1) {
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = static_cast<unsigned>(kernel.cluster_size);
    cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  JAXMOE_CUDA(LaunchKernelEx(&config, call.loaded->functions[device], arguments, nullptr));
  return Error::Success();
}

// x f8[M, K] or [e, C, K]; x_scale f32[K/128, M'] or [e, K/128, C']; weights f8[e, N, K];
// weight_scale f32[e, N/128, K/128]; sizes s32[e]; y bf16[M, N] or [e, C, N].
Error Fp8(CUstream stream, int32_t device, AnyBuffer x, AnyBuffer x_scale, AnyBuffer weights,
          AnyBuffer weight_scale, AnyBuffer sizes, Out<AnyBuffer> y, int64_t id) {
  HostTimer timer;
  Call call;
  JAXMOE_RETURN_IF_ERROR(Prepare(id, device, x, weights, sizes, *y, stream, &call));
  const CudaDriver* driver = call.driver;
  const DeepGemmKernel& kernel = call.loaded->kernel;
  JAXMOE_REQUIRE(kernel.is_fp8, "the kernel is not for FP8");
  if (call.rows == 0) return Error::Success();
  const int64_t blocks = (kernel.depth + kScaleBlock - 1) / kScaleBlock;
  const int64_t scale_rows = (call.rows + 3) / 4 * 4;
  JAXMOE_REQUIRE(static_cast<int64_t>(x_scale.element_count()) ==
                     call.row_groups * blocks * scale_rows,
                 "the scales of x " + ToString(x_scale) + " must be " +
                     Dims(call.row_groups, blocks, scale_rows));
  alignas(64) CUtensorMap map_x, map_weights, map_y, map_scale;
  const Tiled tiled[] = {
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, x.untyped_data(), kernel.depth,
       call.rows * call.row_groups, kSwizzle, kernel.block_m, kSwizzle},
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, weights.untyped_data(), kernel.depth,
       kernel.num_out * kernel.num_groups, kSwizzle, kernel.block_n, kSwizzle},
      {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, y->untyped_data(), kernel.num_out,
       call.rows * call.row_groups, kernel.swizzle_d / 2, kernel.block_m, kernel.swizzle_d},
      {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, x_scale.untyped_data(), scale_rows,
       blocks * call.row_groups, kernel.block_m, 1, 0}};
  CUtensorMap* maps[] = {&map_x, &map_weights, &map_y, &map_scale};
  for (int i = 0; i < 4; ++i) {
    if (CUresult result = Encode(driver, tiled[i], maps[i]); result != CUDA_SUCCESS) {
      return Error::Internal(CudaErrorText(*driver, "cuTensorMapEncodeTiled", result));
    }
  }
  void* scale_data = weight_scale.untyped_data();
  void* sizes_data = sizes.untyped_data();
  uint32_t m = static_cast<uint32_t>(call.rows);
  uint32_t n = static_cast<uint32_t>(kernel.num_out), k = static_cast<uint32_t>(kernel.depth);
  void* arguments[] = {&scale_data, &sizes_data, &m,     &n,        &k,
                       &map_x,      &map_weights, &map_y, &map_scale};
  return Launch(call, device, stream, arguments);
}

// As Fp8, with bf16 operands and no scales.
Error Bf16(CUstream stream, int32_t device, AnyBuffer x, AnyBuffer weights, AnyBuffer sizes,
           Out<AnyBuffer> y, int64_t id) {
  HostTimer timer;
  Call call;
  JAXMOE_RETURN_IF_ERROR(Prepare(id, device, x, weights, sizes, *y, stream, &call));
  const CudaDriver* driver = call.driver;
  const DeepGemmKernel& kernel = call.loaded->kernel;
  JAXMOE_REQUIRE(!kernel.is_fp8, "the kernel is for FP8");
  if (call.rows == 0) return Error::Success();
  alignas(64) CUtensorMap map_x, map_weights, map_y;
  const Tiled tiled[] = {
      {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x.untyped_data(), kernel.depth,
       call.rows * call.row_groups, kSwizzle / 2, kernel.block_m, kSwizzle},
      {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, weights.untyped_data(), kernel.depth,
       kernel.num_out * kernel.num_groups, kSwizzle / 2, kernel.block_n, kSwizzle},
      {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, y->untyped_data(), kernel.num_out,
       call.rows * call.row_groups, kernel.swizzle_d / 2, kernel.block_m, kernel.swizzle_d}};
  CUtensorMap* maps[] = {&map_x, &map_weights, &map_y};
  for (int i = 0; i < 3; ++i) {
    if (CUresult result = Encode(driver, tiled[i], maps[i]); result != CUDA_SUCCESS) {
      return Error::Internal(CudaErrorText(*driver, "cuTensorMapEncodeTiled", result));
    }
  }
  void* sizes_data = sizes.untyped_data();
  uint32_t m = static_cast<uint32_t>(call.rows);
  uint32_t n = static_cast<uint32_t>(kernel.num_out), k = static_cast<uint32_t>(kernel.depth);
  void* arguments[] = {&sizes_data, &m, &n, &k, &map_x, &map_weights, &map_y};
  return Launch(call, device, stream, arguments);
}

// The function on every device, ready to launch: nothing is loaded lazily inside a capture.
CUresult Load(const CudaDriver* driver, const std::string& cubin, Loaded* loaded,
              const char** failed) {
#define JAXMOE_TRY(call)                                                       \
  if (CUresult result = driver->call; result != CUDA_SUCCESS) {                \
    *failed = #call;                                                           \
    return result;                                                             \
  }
  JAXMOE_TRY(LibraryLoadData(&loaded->library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr,
                             0))
  unsigned count = 0;
  JAXMOE_TRY(LibraryGetKernelCount(&count, loaded->library))
  if (count != 1) {
    *failed = "a cubin must hold one kernel";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  CUkernel kernel;
  JAXMOE_TRY(LibraryEnumerateKernels(&kernel, 1, loaded->library))
  int num_devices = 0;
  JAXMOE_TRY(DeviceGetCount(&num_devices))
  for (int ordinal = 0; ordinal < num_devices; ++ordinal) {
    CUdevice device;
    CUcontext context;
    JAXMOE_TRY(DeviceGet(&device, ordinal))
    JAXMOE_TRY(DevicePrimaryCtxRetain(&context, device))
    JAXMOE_TRY(CtxPushCurrent(context))
    CUfunction function = nullptr;
    CUresult result = driver->KernelGetFunction(&function, kernel);
    if (result == CUDA_SUCCESS) {
      result = driver->KernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                          static_cast<int>(loaded->kernel.shared_bytes), kernel,
                                          device);
    }
    driver->CtxPopCurrent(&context);
    if (result != CUDA_SUCCESS) {
      *failed = "loading the kernel on a device";
      return result;
    }
    loaded->functions.push_back(function);
  }
#undef JAXMOE_TRY
  return CUDA_SUCCESS;
}

}  // namespace

std::string RegisterDeepGemmKernel(int64_t id, const std::string& cubin,
                                   const DeepGemmKernel& kernel) {
  std::string error;
  const CudaDriver* driver = GetCudaDriver(&error);
  if (driver == nullptr) return error;
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  Entry& entry = registry.kernels[id];
  if (entry.loaded) return "";
  auto loaded = std::make_unique<Loaded>();
  loaded->kernel = kernel;
  const char* failed = "";
  if (CUresult result = Load(driver, cubin, loaded.get(), &failed); result != CUDA_SUCCESS) {
    return CudaErrorText(*driver, failed, result);
  }
  entry.loaded = std::move(loaded);
  registry.changed.notify_all();
  return "";
}

void AnnounceDeepGemmKernel(int64_t id) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  registry.kernels[id].error.clear();
}

void FailDeepGemmKernel(int64_t id, const std::string& error) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  registry.kernels[id].error = error;
  registry.changed.notify_all();
}

std::map<std::string, int64_t> DeepGemmLaunches() {
  std::map<std::string, int64_t> counts;
  for (size_t i = 0; i < kCounterNames.size(); ++i) counts[kCounterNames[i]] = launches[i];
  counts["captured"] = captured;
  return counts;
}

int64_t DeepGemmHostNanoseconds() { return host_nanoseconds; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(kDeepGemmInstantiate, Instantiate,
                              Ffi::BindInstantiate().Attr<int64_t>("kernel"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDeepGemmFp8, Fp8,
                              Ffi::Bind()
                                  .Ctx<PlatformStream<CUstream>>()
                                  .Ctx<DeviceOrdinal>()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // x_scale
                                  .Arg<AnyBuffer>()  // weights
                                  .Arg<AnyBuffer>()  // weight_scale
                                  .Arg<AnyBuffer>()  // sizes
                                  .Ret<AnyBuffer>()  // y
                                  .Attr<int64_t>("kernel"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDeepGemmBf16, Bf16,
                              Ffi::Bind()
                                  .Ctx<PlatformStream<CUstream>>()
                                  .Ctx<DeviceOrdinal>()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // weights
                                  .Arg<AnyBuffer>()  // sizes
                                  .Ret<AnyBuffer>()  // y
                                  .Attr<int64_t>("kernel"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxmoe
