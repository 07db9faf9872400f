// Guard and hooks of torch's private device type, for one device on which nothing takes any time.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace dsat {

const c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

class OneDevice : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

class Hooks : public at::PrivateUse1HooksInterface {
 public:
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const { return true; }  // called by torch 2.9; older versions lack it
};

c10::impl::DeviceGuardImplRegistrar guard(kType, new OneDevice());
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

}  // namespace dsat

// Autograd forwards the operators of this device, which has no autograd kernels.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
