// Converts Python's tensors to views of their memory, and views to arrays.
#include "python/src/bindings.h"
#include "python/src/dlpack.h"
#include "tilestone/base/memory_map.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

struct DropReference {
  void operator()(const void* object) const {
    drop_reference(static_cast<PyObject*>(const_cast<void*>(object)));
  }
};

// A tilestone._torch.devices.Transfer. What it does runs on the current thread, so that a signal's
// handler ends the call and not the copies.
class PythonTransfer : public DeviceTransfer {
 public:
  PythonTransfer(nb::handle object, std::string what)
      : object_(keep_alive(object)), what_(std::move(what)) {}
  ~PythonTransfer() override {
    // Whoever destroys it without waiting has failed for another reason. On the main thread several
    // signals may come.
    for (int tries = 0; object_ != nullptr && tries < kTries; ++tries) {
      try {
        wait();
      } catch (...) {
      }
    }
  }

  // After an exception `object_` knows whether the copies have ended.
  void wait() override {
    if (object_ == nullptr) return;
    with_gil_here(what_, [&] { kept_object(object_).attr("wait")(); });
    object_ = nullptr;
  }

 private:
  static constexpr int kTries = 8;
  std::shared_ptr<const void> object_;
  const std::string what_;
};

// A tilestone._torch.devices.DeviceTensor, or a box of it.
class PythonDeviceMemory : public DeviceMemory {
 public:
  PythonDeviceMemory(nb::handle object, Dims shape, uint64_t itemsize)
      : object_(keep_alive(object)),
        lane_(keep_alive(object.attr("lane"))),
        device_(nb::cast<std::string>(object.attr("device"))),
        pins_(nb::cast<bool>(object.attr("lane").attr("pins"))),
        place_{reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(object.attr("address"))),
               std::move(shape), nb::cast<Dims>(object.attr("strides")), itemsize} {}
  PythonDeviceMemory(const PythonDeviceMemory& whole, Box box)
      : object_(whole.object_),
        lane_(whole.lane_),
        device_(whole.device_),
        pins_(whole.pins_),
        place_(whole.place_),
        box_(std::move(box)) {}

  std::string device() const override { return device_; }

  std::unique_ptr<DeviceTransfer> submit(CopyTo to, std::span<const DeviceCopy> copies) override {
    const bool to_host = to == CopyTo::kHost;
    const std::string what = (to_host ? "copying from " : "copying to ") + device_;
    return with_gil_here(what, [&]() -> std::unique_ptr<DeviceTransfer> {
      nb::list all;
      for (const DeviceCopy& copy : copies) {
        all.append(static_cast<const PythonDeviceMemory&>(*copy.memory).described(copy));
      }
      const nb::object transfer = kept_object(lane_).attr("submit")(to_host, all);
      return std::make_unique<PythonTransfer>(transfer, what);
    });
  }

  std::shared_ptr<DeviceMemory> narrow(const Box& box) override {
    Box inside = box;
    for (size_t d = 0; box_ && d < box.rank(); ++d) inside.offset[d] += box_->offset[d];
    return std::make_shared<PythonDeviceMemory>(*this, std::move(inside));
  }

  StridedView place() const override { return box_ ? place_.narrow(*box_) : place_; }

  nb::handle object() const { return kept_object(object_); }

  PinHost pin() const override {
    if (!pins_) return {};
    return [lane = lane_](std::shared_ptr<std::byte> memory, uint64_t bytes) {
      return with_gil("pinning host memory", [&] { return pinned(lane, memory, bytes); });
    };
  }

 private:
  nb::object described(const DeviceCopy& copy) const {
    // Writable in both directions, because torch has no tensors over read-only memory.
    const nb::object host =
        nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(copy.host.data()),
                                          static_cast<Py_ssize_t>(copy.host.size()), PyBUF_WRITE));
    const nb::handle object = kept_object(object_);
    if (!box_) return nb::make_tuple(object, nb::none(), nb::none(), copy.begin, host);
    return nb::make_tuple(object, box_->offset, box_->shape, copy.begin, host);
  }

  // The Python object unpins the memory and then releases it. So it does not matter when it is
  // destroyed.
  static std::shared_ptr<std::byte> pinned(const std::shared_ptr<const void>& lane,
                                           const std::shared_ptr<std::byte>& memory,
                                           uint64_t bytes) {
    const nb::capsule owner(new std::shared_ptr<std::byte>(memory), [](void* kept) noexcept {
      delete static_cast<std::shared_ptr<std::byte>*>(kept);
    });
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    const nb::object pinned = kept_object(lane).attr("pin")(address, bytes, owner);
    return pinned.is_none() ? memory : std::shared_ptr<std::byte>(keep_alive(pinned), memory.get());
  }

  std::shared_ptr<const void> object_;
  std::shared_ptr<const void> lane_;
  std::string device_;
  bool pins_ = false;
  StridedView place_;  // of the whole
  std::optional<Box> box_;
};

template <typename Array>
TensorView view_of(const Array& array, nb::handle owner) {
  if (array.device_type() != nb::device::cpu::value) {
    throw Error(ErrorCode::kUnsupported,
                "an array with DLPack must be in CPU memory (only torch tensors may be on a "
                "device)");
  }
  const std::optional<DType> dtype = to_dtype(array.dtype());
  if (!dtype) {
    throw Error(ErrorCode::kUnsupported,
                "an array's DLPack element type (code " + std::to_string(array.dtype().code) +
                    ", " + std::to_string(array.dtype().bits) + " bits) is not supported");
  }
  TensorView view = TensorView::without_data(*dtype, {});
  view.data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array.data())));
  for (size_t i = 0; i < array.ndim(); ++i) {
    view.shape.push_back(static_cast<int64_t>(array.shape(i)));
    view.strides.push_back(array.stride(i));
  }
  view.owner = keep_alive(owner);
  return view;
}

nb::object from_dlpack(nb::handle object, bool writable) {
  nb::ndarray<> array;
  if (nb::try_cast(object, array)) {
    const TensorView view = view_of(array, object);
    if (writable && shares_elements(view.shape, view.strides)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "can't fill an array in which several elements share memory");
    }
    return nb::cast(view);
  }
  if (writable) return nb::none();
  nb::ndarray<nb::ro> readable;
  if (nb::try_cast(object, readable)) return nb::cast(view_of(readable, object));
  return nb::none();
}

TensorView strided(uintptr_t data, std::string_view dtype, Dims shape, Dims strides,
                   uintptr_t begin, uint64_t bytes, nb::handle owner) {
  return TensorView::strided(reinterpret_cast<void*>(data), dtype_named(dtype), std::move(shape),
                             std::move(strides), reinterpret_cast<const void*>(begin), bytes,
                             keep_alive(owner));
}

// Torch is imported. No static object with a guard, because another thread may get the GIL while
// the object is made.
std::optional<TensorView> of_torch(nb::handle tensor, bool for_load, nb::handle owner) {
  static const TorchTensors* torch_tensors = nullptr;
  if (torch_tensors == nullptr) torch_tensors = new TorchTensors();
  std::optional<TensorView> view = torch_tensors->find_view(tensor, for_load);
  if (view && !owner.is(tensor)) view->owner = keep_alive(owner);
  return view;
}

TensorView on_device(std::string_view dtype, Dims shape, nb::handle memory, nb::handle owner) {
  TensorView view = TensorView::without_data(dtype_named(dtype), std::move(shape));
  view.device = std::make_shared<PythonDeviceMemory>(memory, view.shape, itemsize(view.dtype));
  view.owner = keep_alive(owner);
  return view;
}

// The view's memory as a writable uint8 array that keeps it alive.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> bytes_of(const TensorView& view) {
  if (view.device || (!view.has_data())) {
    throw Error(ErrorCode::kInvalidArgument, "a view without host memory has no bytes");
  }
  if (!view.strided_view().is_contiguous()) {
    throw Error(ErrorCode::kInvalidArgument, "only a contiguous view has a property bytes");
  }
  auto* owner = new std::shared_ptr<const void>(view.owner);
  nb::capsule capsule(
      owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<const void>*>(p); });
  const size_t size = view.bytes();
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(view.data, {size}, capsule);
}

}  // namespace

std::shared_ptr<const void> keep_alive(nb::handle object) {
  Py_INCREF(object.ptr());
  return std::shared_ptr<const void>(static_cast<const void*>(object.ptr()), DropReference{});
}

nb::handle kept_object(const std::shared_ptr<const void>& owner) {
  if (!owner || std::get_deleter<DropReference>(owner) == nullptr) return {};
  return static_cast<PyObject*>(const_cast<void*>(owner.get()));
}

nb::handle device_object(const TensorView& tensor) {
  return static_cast<const PythonDeviceMemory&>(*tensor.device).object();
}

StateNode object_node(nb::handle object) {
  TensorView token = TensorView::without_data(DType::kUInt8, {0});
  token.owner = keep_alive(object);
  return token;
}

DType dtype_named(std::string_view name) {
  if (auto dtype = parse_dtype(name)) return *dtype;
  throw Error(ErrorCode::kInvalidArgument,
              "\"" + std::string(name) + "\" is not an element type of a checkpoint");
}

nb::object from_tensor(const TensorView& view, nb::handle original, const Bridge& bridge) {
  if (nb::handle kept = kept_object(view.owner)) return nb::borrow(kept);
  if (view.device || !view.has_data() || view.strided_view().is_contiguous()) {
    return bridge.make_array(view, original);
  }
  TensorView copy = TensorView::allocate(view.dtype, view.shape);
  pack_range(view.strided_view(), 0, {copy.data, copy.bytes()});
  return bridge.make_array(copy, original);
}

void bind_tensor(nb::module_& m) {
  nb::class_<TensorView>(m, "TensorView", "A borrowed view of a tensor's memory.")
      .def_static("strided", &strided, "data"_a, "dtype"_a, "shape"_a, "strides"_a, "begin"_a,
                  "bytes"_a, "owner"_a,
                  "Memory at address `data`, which must be inside [begin, begin + bytes); strides "
                  "are in elements.")
      .def_static("on_device", &on_device, "dtype"_a, "shape"_a, "memory"_a, "owner"_a,
                  "Memory on a device, which is copied from and to block by block.")
      .def_static("of_torch", &of_torch, "tensor"_a, "for_load"_a, "owner"_a,
                  nb::sig("def of_torch(tensor: object, for_load: bool, owner: object) -> "
                          "TensorView | None"),
                  "A view of a dense torch.Tensor or Parameter in host memory; None if it needs "
                  "more than a look at its memory.")
      .def_static(
          "without_data",
          [](std::string_view dtype, Dims shape) {
            return TensorView::without_data(dtype_named(dtype), std::move(shape));
          },
          "dtype"_a, "shape"_a, "A tensor without memory, which a load allocates.")
      .def_static("from_dlpack", &from_dlpack, "array"_a, "writable"_a,
                  nb::sig("def from_dlpack(array: object, writable: bool) -> TensorView | None"),
                  "A view of an array that supports DLPack; None if the array does not support it, "
                  "or is read-only but `writable` is True.")
      .def_prop_ro("dtype", [](const TensorView& v) { return to_string(v.dtype); })
      .def_prop_ro("shape", [](const TensorView& v) { return v.shape; })
      .def_prop_ro("nbytes", &TensorView::bytes)
      .def(
          "with_owner",
          [](TensorView view, nb::handle owner) {
            view.owner = keep_alive(owner);
            return view;
          },
          "owner"_a, "A view of the same memory that another object keeps alive.")
      .def_prop_ro(
          "owner", [](const TensorView& v) { return nb::borrow(kept_object(v.owner)); },
          nb::sig("def owner(self) -> object"))
      .def_prop_ro("bytes", &bytes_of, nb::rv_policy::reference,
                   nb::sig("def bytes(self) -> numpy.typing.NDArray[numpy.uint8]"),
                   "The memory of a contiguous view as an array of uint8, without a copy.");
  m.def("shares_elements", &shares_elements, "shape"_a, "strides"_a,
        "Whether several elements may share memory, as those of an expanded tensor do.");
  m.def(
      "is_writable",
      [](uintptr_t data, uint64_t bytes) {
        return is_writable_now(reinterpret_cast<const void*>(data), bytes);
      },
      "data"_a, "bytes"_a, "Whether memory of this process is mapped for writing.");
  m.def(
      "itemsize", [](std::string_view name) { return itemsize(dtype_named(name)); }, "dtype"_a,
      "Bytes per element.");
  m.def(
      "dtypes",
      [] {
        std::vector<std::string> names;
        for (DType dtype : all_dtypes()) names.emplace_back(to_string(dtype));
        return names;
      },
      "Names of all element types.");
}

}  // namespace tilestone::python
