#include "ffi/testing/handler_calls.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>

#include "ffi/testing/call_context.h"
#include "ffi/testing/fake_xla.h"

namespace moe_lb::testing {
namespace {

// A buffer as in XLA: aligned, and of exact size, so that a sanitizer detects overruns.
class Allocation {
 public:
  explicit Allocation(const std::vector<unsigned char>& bytes) : size_(bytes.size()) {
    constexpr size_t kAlignment = 64;
    if (size_ == 0) return;  // a null pointer, which handlers must not dereference
    if (posix_memalign(&data_, kAlignment, size_) != 0) std::abort();
    std::memcpy(data_, bytes.data(), size_);
  }
  ~Allocation() { std::free(data_); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  void* data() const { return data_; }
  bool holds(const std::vector<unsigned char>& bytes) const {
    return size_ == 0 || std::memcmp(data_, bytes.data(), size_) == 0;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

}  // namespace

// ---- frames --------------------------------------------------------------------

XLA_FFI_CallFrame EmptyFrame(const XLA_FFI_Api* api, XLA_FFI_ExecutionStage stage) {
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = api;
  frame.stage = stage;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

Ending EndingOf(XLA_FFI_Error* error) {
  Ending ending;
  if (error == nullptr) return ending;
  ending.ok = false;
  ending.code = error->code;
  ending.message = std::move(error->message);
  delete error;
  return ending;
}

// ---- executions ----------------------------------------------------------------

// Arguments, results and frame of a call, alive until its end.
struct Execution::Buffers {
  explicit Buffers(const Operands& given) : operands(given) {
    std::vector<const Array*> contents;
    for (const Array& array : operands.rets) contents.push_back(&array);
    for (const auto& [arg, ret] : operands.aliases) contents[ret] = &operands.args[arg];
    for (size_t i = 0; i < operands.rets.size(); ++i) {
      rets.push_back(std::make_unique<Allocation>(contents[i]->bytes));
      Add(operands.rets[i], *rets[i], ret_buffers);
      ret_types.push_back(XLA_FFI_RetType_BUFFER);
    }
    for (size_t i = 0; i < operands.args.size(); ++i) {
      const auto alias = operands.aliases.find(i);
      args.push_back(alias == operands.aliases.end() ? std::make_unique<Allocation>(operands.args[i].bytes) : nullptr);
      Add(operands.args[i], args[i] != nullptr ? *args[i] : *rets[alias->second], arg_buffers);
      arg_types.push_back(XLA_FFI_ArgType_BUFFER);
    }
    for (XLA_FFI_Buffer& buffer : arg_buffers) arg_pointers.push_back(&buffer);
    for (XLA_FFI_Buffer& buffer : ret_buffers) ret_pointers.push_back(&buffer);
  }

  void Add(const Array& array, const Allocation& allocation, std::deque<XLA_FFI_Buffer>& to) {
    dims.push_back(array.dims);
    to.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, allocation.data(),
                  static_cast<int64_t>(array.dims.size()), dims.back().data()});
  }

  // Returns true if no argument was written.
  bool ArgumentsHold() const {
    for (size_t i = 0; i < args.size(); ++i) {
      if (args[i] != nullptr && !args[i]->holds(operands.args[i].bytes)) return false;
    }
    return true;
  }

  std::vector<Array> Results() const {
    std::vector<Array> results = operands.rets;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].bytes.empty()) std::memcpy(results[i].bytes.data(), rets[i]->data(), results[i].bytes.size());
    }
    return results;
  }

  const Operands operands;
  std::vector<std::unique_ptr<Allocation>> args;
  std::vector<std::unique_ptr<Allocation>> rets;
  std::deque<std::vector<int64_t>> dims;
  std::deque<XLA_FFI_Buffer> arg_buffers;
  std::deque<XLA_FFI_Buffer> ret_buffers;
  std::vector<XLA_FFI_ArgType> arg_types;
  std::vector<XLA_FFI_RetType> ret_types;
  std::vector<void*> arg_pointers;
  std::vector<void*> ret_pointers;
  Context context = {};
};

void Execution::Complete(XLA_FFI_Error* error) {
  Ending ending = EndingOf(error);
  ending.wrote_argument = !buffers_->ArgumentsHold();
  if (ending.ok) ending.rets = buffers_->Results();
  // Free the buffers now, although other devices of the call may run: the sanitizer detects a copy still using
  // them.
  buffers_.reset();
  // Notify under the lock: the waiting thread may destroy this.
  const std::lock_guard<std::mutex> lock(mutex_);
  ending_ = std::move(ending);
  changed_.notify_all();
}

std::optional<Ending> Execution::Wait(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, limit, [this] { return ending_.has_value(); });
  return ending_;
}

bool Execution::is_over() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ending_.has_value();
}

// ---- call sites ----------------------------------------------------------------

class CallSite::AttributesFrame {
 public:
  explicit AttributesFrame(const Attributes& attributes) {
    for (const auto& [name, attribute] : attributes) Add(name, attribute);
    Seal();
  }
  AttributesFrame(const std::vector<std::string>& keys, const std::vector<Attribute>& values) {
    for (size_t i = 0; i < keys.size(); ++i) Add(keys[i], values[i]);
    Seal();
  }

  const XLA_FFI_Attrs& frame() const { return frame_; }

 private:
  void Add(const std::string& name, const Attribute& attribute) {
    // Not null-terminated, as XLA may do.
    names_.push_back(std::make_unique<Allocation>(std::vector<unsigned char>(name.begin(), name.end())));
    name_spans_.push_back({static_cast<const char*>(names_.back()->data()), name.size()});
    bytes_.push_back(std::make_unique<Allocation>(attribute.bytes));
    void* const data = bytes_.back()->data();
    types_.push_back(attribute.type);
    switch (attribute.type) {
      case XLA_FFI_AttrType_SCALAR:
        scalars_.push_back({attribute.dtype, data});
        attributes_.push_back(&scalars_.back());
        break;
      case XLA_FFI_AttrType_ARRAY:
        arrays_.push_back({attribute.dtype, attribute.bytes.size() / ByteWidth(attribute.dtype), data});
        attributes_.push_back(&arrays_.back());
        break;
      case XLA_FFI_AttrType_STRING:
        strings_.push_back({static_cast<const char*>(data), attribute.bytes.size()});
        attributes_.push_back(&strings_.back());
        break;
      case XLA_FFI_AttrType_DICTIONARY:
        dictionaries_.push_back(std::make_unique<AttributesFrame>(attribute.keys, attribute.values));
        attributes_.push_back(&dictionaries_.back()->frame_);
        break;
    }
  }

  void Seal() {
    for (XLA_FFI_ByteSpan& span : name_spans_) name_pointers_.push_back(&span);
    frame_ = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,           static_cast<int64_t>(types_.size()), types_.data(),
              name_pointers_.data(),     attributes_.data()};
  }

  std::deque<std::unique_ptr<Allocation>> names_;
  std::deque<std::unique_ptr<Allocation>> bytes_;
  std::deque<XLA_FFI_ByteSpan> name_spans_;
  std::deque<XLA_FFI_ByteSpan> strings_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<std::unique_ptr<AttributesFrame>> dictionaries_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<void*> attributes_;
  XLA_FFI_Attrs frame_ = {};
};

CallSite::CallSite(FakeXla& xla, const HandlerRegistration& handler, const Attributes& attributes)
    : xla_(xla), handler_(handler), attributes_(std::make_unique<AttributesFrame>(attributes)) {
  if (handler.instantiate == nullptr) return;
  Context context = {&xla_, 0, 0, PoolMode::kNone, {0}, nullptr};
  XLA_FFI_CallFrame frame = EmptyFrame(&xla_.api(), XLA_FFI_ExecutionStage_INSTANTIATE);
  frame.ctx = reinterpret_cast<ContextPointer>(&context);
  frame.attrs = attributes_->frame();
  instantiated_ = EndingOf(handler.instantiate(&frame));
  state_type_ = context.state_type;
  state_ = context.state;
}

CallSite::~CallSite() {
  // XLA destroys the state with the executable, through the deleter of its registered type.
  if (state_ != nullptr) xla_.type_info(state_type_)->deleter(state_);
}

std::shared_ptr<Execution> CallSite::Execute(const Operands& operands, int64_t run_id, int32_t device, PoolMode pool) {
  auto execution = std::make_shared<Execution>();
  execution->buffers_ = std::make_unique<Execution::Buffers>(operands);
  Execution::Buffers& buffers = *execution->buffers_;
  buffers.context = {&xla_, run_id, device, pool, state_type_, state_};
  XLA_FFI_CallFrame frame = EmptyFrame(&xla_.api(), XLA_FFI_ExecutionStage_EXECUTE);
  frame.ctx = reinterpret_cast<ContextPointer>(&buffers.context);
  frame.args.size = static_cast<int64_t>(buffers.arg_types.size());
  frame.args.types = buffers.arg_types.data();
  frame.args.args = buffers.arg_pointers.data();
  frame.rets.size = static_cast<int64_t>(buffers.ret_types.size());
  frame.rets.types = buffers.ret_types.data();
  frame.rets.rets = buffers.ret_pointers.data();
  frame.attrs = attributes_->frame();
  // The execution owns all data that the frame refers to, because an asynchronous handler may use buffers after its
  // return. The frame itself must not be used then, and is gone.
  XLA_FFI_Error* const error = handler_.execute(&frame);
  if (frame.future == nullptr) {
    execution->Complete(error);
  } else {
    OnReady(frame.future, [execution](XLA_FFI_Error* late) { execution->Complete(late); });
  }
  return execution;
}

// ---- invocations ---------------------------------------------------------------

size_t DeviceArray::size_bytes() const {
  size_t count = 1;
  for (const int64_t dim : dims) count *= static_cast<size_t>(dim);
  return count * ByteWidth(dtype);
}

Invocation::Invocation(CallSite& site, DeviceArrays args, DeviceArrays rets, int64_t run_id, int32_t device,
                       void* stream)
    : site_(site), args_(std::move(args)), rets_(std::move(rets)), run_id_(run_id), device_(device), stream_(stream) {
  if (site.handler_.initialize != nullptr) initialized_ = Run(XLA_FFI_ExecutionStage_INITIALIZE);
}

Invocation::~Invocation() {
  if (state_ != nullptr) site_.xla_.type_info(state_type_)->deleter(state_);
}

Ending Invocation::Run(XLA_FFI_ExecutionStage stage) {
  std::deque<XLA_FFI_Buffer> buffers;
  const auto point = [&buffers](DeviceArrays& arrays, std::vector<void*>* pointers) {
    for (DeviceArray& array : arrays) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, array.data,
                         static_cast<int64_t>(array.dims.size()), array.dims.data()});
      pointers->push_back(&buffers.back());
    }
  };
  std::vector<void*> args, rets;
  point(args_, &args);
  point(rets_, &rets);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  Context context = {&site_.xla_,  run_id_, device_,     PoolMode::kNone, site_.state_type_,
                     site_.state_, stream_, state_type_, state_};
  XLA_FFI_CallFrame frame = EmptyFrame(&site_.xla_.api(), stage);
  frame.ctx = reinterpret_cast<ContextPointer>(&context);
  frame.args.size = static_cast<int64_t>(args.size());
  frame.args.types = arg_types.data();
  frame.args.args = args.data();
  frame.rets.size = static_cast<int64_t>(rets.size());
  frame.rets.types = ret_types.data();
  frame.rets.rets = rets.data();
  frame.attrs = site_.attributes_->frame();
  const bool initializes = stage == XLA_FFI_ExecutionStage_INITIALIZE;
  Ending ending = EndingOf((initializes ? site_.handler_.initialize : site_.handler_.execute)(&frame));
  state_type_ = context.initialized_type;
  state_ = context.initialized;
  return ending;
}

}  // namespace moe_lb::testing
