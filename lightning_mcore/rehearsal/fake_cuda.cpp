// SPDX-License-Identifier: Apache-2.0
// A CUDA device that does nothing, so that PyTorch accepts fake CUDA tensors on a machine without a GPU.
//
// PyTorch asks two objects about a device: the guard, which switches devices and streams, and the hooks, which say
// whether CUDA is there. Autograd asks both. Fake tensors have no memory and run no kernels, so both can be empty. The
// hooks are registered when this library is loaded, before those of a build of PyTorch with CUDA, and with a higher
// priority. Such a build registers its guard when it is imported, so fake_cuda_guard() replaces it afterwards.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 64;  // more than a node has
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex indexOf(c10::Device device) {
  return device.index() < 0 ? current : device.index();
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return c10::Device(type(), current); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    current = indexOf(device);
    return before;
  }
  void setDevice(c10::Device device) const override { current = indexOf(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = indexOf(device); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current; }
};

const bool registered = [] {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<FakeHooks>(args);
      },
      c10::REGISTRY_PREFERRED);
  return true;
}();

}  // namespace

extern "C" void fake_cuda_guard(int device) {
  static FakeGuard guard;
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, &guard);
  current = static_cast<c10::DeviceIndex>(device);
}
